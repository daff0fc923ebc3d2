"""A GGUF file on a CPU, beside llama.cpp on the same threads, in turns: decoding of one request,
prefill of 512 tokens, and 32 requests at once.

    PYTHONPATH=.:tests python -m cpu_peers --rounds 7 --save results
    make cpu-peers

Needs llama-cpp-python. A round is one of ours and one of theirs after the other, so that what else
the machine does is done to both; what counts is the median of the rounds' ratios. Seconds are of
the clock; `--cpu-seconds` takes those of the process, for a machine that others use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.bench.llama_cpp import LlamaCpp
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine, Sampling
from ridgeline.hardware import detect
from ridgeline.models.checkpoint import resolve_model
from ridgeline.records import Record, Value

Clock = Callable[[], float]
Seconds = dict[str, float]


class Sizes(NamedTuple):
    """Tokens, but for `at_once`, which is a number of requests."""

    prompt: int = 512  # of the prefill
    before: int = 16  # decoding
    output: int = 64
    at_once: int = 32
    at_once_prompt: int = 64
    at_once_output: int = 32


SHORT = Sizes(prompt=128, output=16, at_once=8, at_once_prompt=16, at_once_output=8)


def greedy(num_tokens: int) -> Sampling:
    return Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def timed(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start


def ours(engine: Engine, prompts: list[list[int]], sizes: Sizes, clock: Clock) -> Seconds:
    long, short = prompts[0], [prompt[: sizes.before] for prompt in prompts]
    many = [prompt[: sizes.at_once_prompt] for prompt in prompts]
    first = timed(lambda: engine.generate([short[1]], greedy(1)), clock)
    whole = timed(lambda: engine.generate([short[2]], greedy(sizes.output + 1)), clock)
    return {
        "decode": whole - first,
        "prefill": timed(lambda: engine.generate([long], greedy(1)), clock),
        "at_once": timed(lambda: engine.generate(many, greedy(sizes.at_once_output)), clock),
    }


def theirs(peer: LlamaCpp, prompts: list[list[int]], sizes: Sizes, clock: Clock) -> Seconds:
    long, short = prompts[0], [prompt[: sizes.before] for prompt in prompts]
    many = [prompt[: sizes.at_once_prompt] for prompt in prompts]
    first = timed(lambda: peer.alone(short[1], 1), clock)
    whole = timed(lambda: peer.alone(short[2], sizes.output + 1), clock)
    return {
        "decode": whole - first,
        "prefill": timed(lambda: peer.alone(long, 1), clock),
        "at_once": timed(
            lambda: peer.together(many, [sizes.at_once_output] * sizes.at_once), clock
        ),
    }


def drawn_prompts(seed: int, sizes: Sizes, vocab_size: int) -> list[list[int]]:
    """Others in each round: nothing of them is in a prefix cache."""
    requests = tuple(WorkloadRequest(sizes.prompt, 1) for _ in range(sizes.at_once))
    workload = Workload("cpu-peers", requests)
    return [workload.prompt_ids(index, vocab_size, seed) for index in range(sizes.at_once)]


def compared(path: Path, rounds: int, sizes: Sizes, clock: Clock) -> tuple[dict[str, Value], str]:
    engine = Engine(path)
    peer = LlamaCpp(path, torch.get_num_threads(), sizes.prompt + sizes.output + 2, sizes.at_once)
    tokens = {
        "decode": sizes.output,
        "prefill": sizes.prompt,
        "at_once": sizes.at_once * sizes.at_once_output,
    }
    own: list[Seconds] = []
    other: list[Seconds] = []
    for number in range(rounds + 1):
        prompts = drawn_prompts(number, sizes, peer.vocab_size)
        pair = ours(engine, prompts, sizes, clock), theirs(peer, prompts, sizes, clock)
        if number:  # the first one is not counted
            own.append(pair[0])
            other.append(pair[1])
            shown = (f"{name} {pair[1][name] / pair[0][name]:.2f}x" for name in tokens)
            print(f"round {number}: {', '.join(shown)}", flush=True)
    values: dict[str, Value] = {}
    for name, count in tokens.items():
        ratios = sorted(b[name] / a[name] for a, b in zip(own, other, strict=True))
        rates = [count / statistics.median(each[name] for each in side) for side in (own, other)]
        middle = statistics.median(ratios)
        spread = (ratios[-1] - ratios[0]) / middle
        values[f"{name}_of_llama_cpp"] = Value(middle, "1", spread=spread, num_samples=rounds)
        values[f"{name}_tokens_per_s"] = Value(rates[0], "token/s", num_samples=rounds)
        values[f"llama_cpp_{name}_tokens_per_s"] = Value(rates[1], "token/s", num_samples=rounds)
        print(f"{name}: {rates[0]:.1f} tokens/s, llama.cpp {rates[1]:.1f}: {middle:.2f}x "
              f"({ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
    build = peer.build
    peer.close()
    return values, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file (default: demo)")
    parser.add_argument("--threads", type=int, default=None, help="default: as torch takes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-seconds", action="store_true")
    parser.add_argument("--short", action="store_true", help="fewer tokens, for a busy machine")
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    path = resolve_model(args.model)
    sizes = SHORT if args.short else Sizes()
    values, build = compared(path, args.rounds, sizes, clock)
    seconds = "of the process's CPU time" if args.cpu_seconds else "by the clock"
    notes = (
        f"{torch.get_num_threads()} threads each, in turns, {seconds}",
        f"llama.cpp: {build}",
        f"decode: {sizes.output} tokens after {sizes.before}; prefill: {sizes.prompt}; at once: "
        f"{sizes.at_once} requests of {sizes.at_once_prompt} tokens, {sizes.at_once_output} made",
    )
    print(*notes, sep="\n")
    if args.save is not None:
        name = f"cpu-peers-{path.stem}"
        record = Record.create(
            name, detect("cpu"), values, ("python", "-m", "cpu_peers", *sys.argv[1:]), notes
        )
        print(record.save(args.save))


if __name__ == "__main__":
    main()
