"""`ridgeline eval`: how good a model is as its recipe runs it, and how far from the original."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ridgeline.bench.peers import PEERS, transformers_peer
from ridgeline.cli.arguments.options import add_flags, add_model, add_recipe, add_save, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.arguments.tasks import add_task, check_task_flags
from ridgeline.cli.tables.eval import render
from ridgeline.cli.tables.figures import divergence_figures, figure
from ridgeline.cli.terminal import Terminal
from ridgeline.data.text_files import read_text
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.errors import QualityError, UnsupportedError, UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import Progress
from ridgeline.quality.divergence import Divergence, check_same_words, divergence
from ridgeline.quality.gate import QualityBounds
from ridgeline.quality.layers import layer_errors
from ridgeline.quality.peer import peer_perplexity
from ridgeline.quality.perplexity import Perplexity, increase, perplexity
from ridgeline.quality.tasks import TaskOptions, difference, run_task
from ridgeline.quality.tasks.score import tokenizer_for
from ridgeline.quality.windows import Windows, check_window, cut
from ridgeline.quantization.choose import in_words
from ridgeline.recipe import Recipe
from ridgeline.records import Record, Value

EXAMPLE = """\
ridgeline eval demo --text book.txt --peer transformers
ridgeline eval demo --text book.txt --kv-dtype int8 --against demo
ridgeline eval demo --task hellaswag --data hellaswag_val.jsonl --limit 200
ridgeline eval demo --task mmlu --data test.parquet --examples dev.parquet"""
MAIN_FLAGS = (
    "--device", "--text", "--window", "--against", "--max-kl", "--max-ppl-increase",
    "--task", "--data", "--limit", "--examples", "--save", "--dtype", "--scheme", "--kv-dtype",
)  # fmt: skip

__all__ = ["EXAMPLE", "MAIN_FLAGS", "add_arguments", "exit_code", "render", "run"]

LAYER_TOKENS = 4096  # from which layers are compared: their shares are steady long before
SHARED_TOKENS = {"cpu": 16_384, "cuda": 65_536}  # of KV cache, where two engines share a device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_recipe(parser)
    text = group(parser, "text")
    text.add_argument(
        "--text", type=Path, metavar="FILE", help="measure perplexity on FILE (UTF-8, may be .gz)"
    )
    text.add_argument("--bytes", type=int, metavar="N", help="use only its first N bytes")
    text.add_argument(
        "--window",
        type=int,
        default=2048,
        metavar="N",
        help="tokens per window; windows do not overlap (default: %(default)s)",
    )
    text.add_argument(
        "--peer", choices=PEERS, help="also measure this library on the same tokens, unquantized"
    )
    against = group(parser, "comparison")
    against.add_argument(
        "--against", metavar="MODEL", help="compare with the original: KL divergence and more"
    )
    against.add_argument(
        "--against-dtype", metavar="DTYPE", help="dtype of the original (default: auto)"
    )
    against.add_argument(
        "--layers", action="store_true", help="also show the error of each layer, worst first"
    )
    add_flags(parser, QualityBounds)
    add_task(parser)
    add_save(parser)
    add_flags(parser, Recipe)


@dataclass
class EvalSubject:
    """What is measured."""

    engine: Engine
    original: Engine | None
    hardware: Hardware


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    bounds, options = check(args)
    text = None if args.text is None else read_text(args.text, args.bytes)
    with terminal.progress() as progress:
        subject = prepared(args, progress)
        engine, original = subject.engine, subject.original
        result: dict[str, Any] = {"model": args.model, **settings(engine), "against": None}
        result |= {"device": subject.hardware.name, "text": None, "task": None, "gate": None}
        result["peer"] = None
        if original is not None:
            result["against"] = {"model": args.against, **settings(original), "divergence": None}
        with ClockSampler(subject.hardware) as clocks:
            if text is not None:
                windows = windows_for(args, text, subject)
                measure_text(args, result, windows, subject, bounds, progress)
            if args.task is not None:
                result["task"] = measure_task(args, subject, options, progress)
    for each in (engine, original):
        if each is not None:
            each.close()
    return saved(args, result, subject.hardware, clocks.median)


def exit_code(document: dict[str, Any]) -> int:
    gate = document["gate"]
    return QualityError.exit_code if gate is not None and not gate["passed"] else 0


def check(args: argparse.Namespace) -> tuple[QualityBounds, TaskOptions]:
    """What can be refused before anything is loaded."""
    bounds = from_flags(args, QualityBounds)
    options = TaskOptions(args.limit, args.shots, args.examples, args.run_code)
    if args.text is None and args.task is None:
        raise UsageError("nothing to measure; add --text FILE, or --task NAME --data FILE")
    if args.bytes is not None and args.bytes < 1:
        raise UsageError(f"--bytes is {args.bytes}; give at least 1")
    needs_text = {"--bytes": args.bytes is not None, "--layers": args.layers}
    needs_text |= {"--peer": args.peer is not None}
    needs_text |= {"--max-kl or --max-ppl-increase": bounds.are_given}
    for flag, given in needs_text.items():
        if given and args.text is None:
            raise UsageError(f"{flag} is of a text, and none is given; add --text FILE.txt")
    if args.against is None and (bounds.are_given or args.layers or args.against_dtype):
        raise UsageError(
            "--max-kl, --max-ppl-increase, --layers and --against-dtype compare with the "
            "original; add --against MODEL"
        )
    check_task_flags(args, options)
    return bounds, options


def prepared(args: argparse.Namespace, progress: Progress) -> EvalSubject:
    """The engines. Two that share a device take no more pages than measuring needs."""
    hardware = detect(args.device)
    path = resolve_model(args.model, progress=progress)
    base = saved_recipe(path) if args.recipe is None else Recipe.load(args.recipe)
    recipe = from_flags(args, Recipe, base)
    if args.layers and recipe.parallel.num_ranks > 1:
        raise UnsupportedError(
            "--layers does not work with --tensor-parallel: the layers are split"
        )
    original, num_pages = None, None
    if args.against is not None:
        num_tokens = max(SHARED_TOKENS[hardware.device_type], 2 * args.window)
        num_pages = -(-num_tokens // recipe.kv.page_size)
        plain = Recipe(dtype=args.against_dtype or "auto", parallel=recipe.parallel)
        path_of_original = resolve_model(args.against, progress=progress)
        original = Engine(
            path_of_original, plain, device=args.device, num_pages=num_pages, progress=progress
        )
    engine = Engine(path, recipe, device=args.device, num_pages=num_pages, progress=progress)
    if original is not None:
        check_same_words(original, engine)
    return EvalSubject(engine, original, hardware)


def settings(engine: Engine) -> dict[str, Any]:
    recipe = engine.recipe
    return {
        "dtype": recipe.dtype,
        "kv_dtype": recipe.kv.dtype,
        "scheme": recipe.scheme,
        "head": recipe.head,
        "plain_for_speed": in_words(engine.choices, recipe.dtype),
    }


def windows_for(args: argparse.Namespace, text: str, subject: EvalSubject) -> Windows:
    for engine in (subject.engine, subject.original):
        if engine is not None:
            check_window(engine, args.window)
    windows = cut(text, tokenizer_for(subject.engine), args.window, str(args.text))
    if subject.original is not None and subject.original.tokenizer is not None:
        theirs = cut(text, subject.original.tokenizer, args.window, str(args.text))
        if theirs.tokens != windows.tokens:
            raise UsageError(
                f"{args.model} and {args.against} have different tokenizers; "
                "only models with the same tokenizer can be compared"
            )
    return windows


def measure_text(
    args: argparse.Namespace,
    result: dict[str, Any],
    windows: Windows,
    subject: EvalSubject,
    bounds: QualityBounds,
    progress: Progress,
) -> None:
    """Fills in `text`, and with an original `against` and `gate`."""
    begun = time.perf_counter()
    if subject.original is None:
        measured = perplexity(subject.engine, windows, progress)
    else:
        compared = divergence(subject.original, subject.engine, windows, progress)
        measured = compared.changed
        result["against"]["divergence"] = compared.to_json()
        result["gate"] = judged(bounds, compared)
    seconds = time.perf_counter() - begun
    source = {"file": str(args.text), "window": args.window, "seconds": seconds}
    result["text"] = source | measured.to_json()
    if args.peer is not None:
        result["peer"] = measure_peer(args, subject, windows, measured, progress)
    if args.layers:
        assert subject.original is not None, "layers are compared with an original's"
        few = windows.tokens[: max(1, LAYER_TOKENS // args.window)]
        parts = layer_errors(subject.original.model, subject.engine.model, few, progress)
        result["against"]["layers"] = [part._asdict() for part in parts]


def measure_peer(
    args: argparse.Namespace,
    subject: EvalSubject,
    windows: Windows,
    ours: Perplexity,
    progress: Progress,
) -> dict[str, Any]:
    """In this process, from the same file, on the same ids."""
    begun, dtype = time.perf_counter(), subject.engine.recipe.dtype
    peer = transformers_peer(resolve_model(args.model), dtype, subject.hardware.device)
    theirs = peer_perplexity(peer, windows, progress)
    seconds = time.perf_counter() - begun
    setup = {"name": args.peer, "version": version(args.peer), "dtype": dtype, "seconds": seconds}
    return setup | theirs.to_json() | {"difference": increase(theirs, ours).to_json()}


def judged(bounds: QualityBounds, compared: Divergence) -> dict[str, Any] | None:
    if not bounds.are_given:
        return None
    problem = bounds.broken_by(compared)
    allowed = {"max_kl": bounds.max_kl, "max_ppl_increase": bounds.max_ppl_increase}
    verdict = bounds.verdict_on(compared)
    return {"passed": problem is None, "problem": problem, "verdict": verdict, **allowed}


def measure_task(
    args: argparse.Namespace, subject: EvalSubject, options: TaskOptions, progress: Progress
) -> dict[str, Any]:
    begun = time.perf_counter()
    score = run_task(args.task, subject.engine, args.data, options, progress)
    seconds = time.perf_counter() - begun
    result = {"name": args.task, "file": str(args.data), "seconds": seconds, **score.to_json()}
    if subject.original is not None:
        theirs = run_task(args.task, subject.original, args.data, options, progress)
        result["original"] = theirs.to_json()
        result["difference"] = difference(theirs, score).to_json()
    return result


def saved(
    args: argparse.Namespace, result: dict[str, Any], hardware: Hardware, clocks: Clocks | None
) -> dict[str, Any]:
    if args.save is None:
        return result
    values = record_values(result)
    name = f"eval-{Path(result['model']).stem}-{result['scheme'] or result['dtype']}"
    notes = () if result["peer"] is None else (f"{args.peer} {result['peer']['version']}",)
    record = Record.create(name, hardware, values, notes=notes, clocks=clocks)
    return result | {"record": str(record.save(args.save))}


def record_values(result: dict[str, Any]) -> dict[str, Value]:
    """Each figure, with the ends of its interval as figures of their own."""
    values: dict[str, Value] = {}
    text, task, against = result["text"], result["task"], result["against"]
    if text is not None:
        values |= figure("perplexity", text["perplexity"], "1")
        values |= figure("bits_per_byte", text["bits_per_byte"], "bit/B")
        values |= figure("num_tokens", text["num_tokens"], "token")
        values |= figure("seconds", text["seconds"], "s")
    if result["peer"] is not None:
        name = result["peer"]["name"]
        values |= figure(f"{name}_perplexity", result["peer"]["perplexity"], "1")
        values |= figure(f"difference_from_{name}", result["peer"]["difference"], "1")
    if against is not None and against["divergence"] is not None:
        values |= divergence_figures(against["divergence"])
    if task is not None:
        values |= figure(task["name"], task["score"], "1")
        values |= figure(f"{task['name']}_acc", task.get("acc"), "1")
        values |= figure(f"{task['name']}_questions", task["num_questions"], "1")
        values |= figure(f"{task['name']}_seconds", task["seconds"], "s")
        values |= figure(f"{task['name']}_difference", task.get("difference"), "1")
    return values
