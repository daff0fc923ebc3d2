"""Vision models under `ridgeline.optimize`, beside torch.compile(mode="max-autotune") of the module
as it is and of its bf16 copy: all in one run, in rounds that take turns, with a record of each
model. Two more cases have no such sides: sizes that 8 does not divide with inputs from the host's
memory, and branches on streams of their own. Two tables at the end: the times, and what came of the
rungs that are for vision models.

    PYTHONPATH=.:tests python -m vision_bench --save results            # or: make gpu-modules
    PYTHONPATH=.:tests python -m vision_bench vit --small --limit 60    # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from vision_models import Branches, SmallConvNet, SmallViT, WindowedEncoder

from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.modules import OptimizedModule, optimize
from ridgeline.ladder.modules.bench import in_words, many_recompiles
from ridgeline.ladder.modules.deadline import OutOfTimeError, time_limit
from ridgeline.ladder.outcome import Goal, Speedup
from ridgeline.profiling.modules.run import measured
from ridgeline.records import Record, Value
from ridgeline.timing import time_host

GIVEN, OURS = "as given", "optimize"
MODES = ("max-autotune", "default")
PEERS = 0.6  # of a model's time, at most, for compiling the sides that are not ours
LEAST_CLIMB_S = 10.0
Call = Callable[[], Any]


UNCOMPILED = ("compile", "autotune")
VISION_RUNGS = ("channels-last", "winograd", "cudnn-benchmark", "pad", "pinned-inputs", "streams",
                "graphs", "compile", "autotune")  # fmt: skip


@dataclass(frozen=True)
class VisionCase:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    on_host: bool = False  # inputs lie in the host's memory
    goal: Goal = "latency"
    skip: tuple[str, ...] = ()  # rungs; where torch.compile is among them no compiled side is timed

    @property
    def has_peers(self) -> bool:
        return "compile" not in self.skip


def odd_sizes(width: int) -> nn.Module:
    """8 divides none of them."""
    torch.manual_seed(0)
    sizes = (width + 1, 3 * width + 5, width + 3, 77)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])


LARGE = {
    "vit": VisionCase(partial(SmallViT, 384, 6, 224, 16, 1000), (1, 3, 224, 224)),
    "conv": VisionCase(partial(SmallConvNet, 64, 8, 1000), (1, 3, 224, 224)),
    "windowed": VisionCase(partial(WindowedEncoder, 384, 4, 512, 16, 8), (1, 3, 512, 512)),
    "branches": VisionCase(partial(Branches, 64), (1, 64, 28, 28)),
    "streams": VisionCase(partial(Branches, 64), (1, 64, 28, 28), skip=(*UNCOMPILED, "graphs")),
    "odd": VisionCase(
        partial(odd_sizes, 1000), (2048, 1001), on_host=True, goal="throughput", skip=UNCOMPILED
    ),
}
SMALL = {
    "vit": VisionCase(partial(SmallViT, 64, 2), (1, 3, 32, 32)),
    "conv": VisionCase(partial(SmallConvNet, 16, 2), (1, 3, 32, 32)),
    "windowed": VisionCase(partial(WindowedEncoder, 64, 2, 32, 8, 2), (1, 3, 32, 32)),
    "branches": VisionCase(partial(Branches, 16), (1, 16, 16, 16)),
    "streams": VisionCase(partial(Branches, 16), (1, 16, 16, 16), skip=(*UNCOMPILED, "graphs")),
    "odd": VisionCase(
        partial(odd_sizes, 64), (32, 65), on_host=True, goal="throughput", skip=UNCOMPILED
    ),
}


@dataclass(frozen=True)
class VisionTimes:
    rates: Mapping[str, Sequence[float]]  # calls a second of each side, round by round
    errors: Mapping[str, float]  # of outputs, relative to those of the module as it is
    ready_s: Mapping[str, float]  # until a side could be called
    stopped: Mapping[str, str]  # sides that were not ready in time, and why
    result: OptimizedModule

    def speedup(self, side: str, over: str) -> Speedup:
        return speedup_of(self.rates[over], self.rates[side])

    def call_s(self, side: str) -> float:
        rates = self.rates[side]
        return 1.0 / sorted(rates)[len(rates) // 2]


def timed_beside(
    case: VisionCase,
    device: torch.device,
    hardware: Hardware,
    *,
    mode: str = MODES[0],
    part_s: float = 120.0,
    rounds: int = MIN_ROUNDS,
    round_s: float = 0.1,
) -> VisionTimes:
    """Ours, the module as it is, and compiled ones, in about `part_s`. Those come first: what they
    tuned is in torch's caches when ours is searched for.
    """
    began = time.monotonic()
    module = case.make().eval().to(device)
    torch.manual_seed(1)
    x = torch.randn(case.shape)
    x = x if case.on_host else x.to(device)
    with torch.inference_mode():
        expected = module(x.to(device)).clone()
    ready_s, stopped = {GIVEN: 0.0}, dict[str, str]()
    sides: dict[str, Call] = {GIVEN: lambda: module(x.to(device))}
    if case.has_peers:
        for name, side in compiled_sides(module, x, mode).items():
            peer_began = time.monotonic()
            left_s = PEERS * part_s - (peer_began - began)
            try:
                with many_recompiles(), torch.inference_mode(), time_limit(left_s, "compiling"):
                    side()
            except OutOfTimeError as error:
                stopped[name] = str(error)
            else:
                sides[name], ready_s[name] = side, time.monotonic() - peer_began
    timing_s = (len(sides) + 1) * (rounds + 1) * round_s
    climb_began = time.monotonic()
    budget_s = max(part_s - timing_s - (climb_began - began), LEAST_CLIMB_S)
    result = optimize(
        module, x, budget_s=budget_s, hardware=hardware, for_=case.goal, skip=case.skip
    )
    sides[OURS], ready_s[OURS] = partial(result, x), time.monotonic() - climb_began
    with many_recompiles(), torch.inference_mode():
        for name in sides.keys() & ready_s.keys() - {GIVEN, OURS}:
            try:
                sides[name]()
            except AssertionError as error:  # seen within torch's trees of graphs (torch 2.11)
                stopped[name] = f"torch.compile's own check failed: {error!r}"
                del sides[name], ready_s[name]
        errors = {name: relative_error(call(), expected) for name, call in sides.items()}
        rates = rates_in_turns(sides, device, rounds, round_s)
    return VisionTimes(rates, errors, ready_s, stopped, result)


def compiled_sides(module: nn.Module, x: Tensor, mode: str) -> dict[str, Call]:
    """With fullgraph, which raises where torch.compile would run uncompiled. A CPU without
    bf16 takes 20 s for a call in it: it gets none.
    """
    compiled = partial(torch.compile, mode=mode, fullgraph=True)
    sides: dict[str, Call] = {mode: partial(compiled(module), x)}
    if x.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        half = copy.deepcopy(module).to(torch.bfloat16)
        sides[f"bf16, {mode}"] = partial(compiled(half), x.to(torch.bfloat16))
    return sides


def rates_in_turns(
    sides: Mapping[str, Call], device: torch.device, rounds: int, round_s: float
) -> dict[str, list[float]]:
    """Every side once in each round, beginning with another each time."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-1, rounds):  # the first warms up
        first = number % len(names)
        for name in names[first:] + names[:first]:
            timing = time_host(sides[name], device=device, target_s=round_s, warmup_s=0.0)
            if number >= 0:
                rates[name].append(1.0 / timing.median_s)
    return rates


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def record_of(name: str, times: VisionTimes, hardware: Hardware, case: VisionCase) -> Record:
    values = {}
    for side, rates in times.rates.items():
        ordered = sorted(1.0 / rate for rate in rates)
        middle = ordered[len(ordered) // 2]
        spread = (ordered[-1] - ordered[0]) / middle
        values[f"{side}: a call"] = Value(middle, "s", spread, len(rates))
        values[f"{side}: error"] = Value(times.errors[side], "1")
        values[f"{side}: ready after"] = Value(times.ready_s[side], "s")
        if side != OURS:
            values[f"{OURS} over {side}"] = Value(times.speedup(OURS, side).value, "x")
    notes = [
        f"inputs {list(case.shape)}, fp32, random weights; calls one at a time, in inference mode",
        f"form: {times.result.form}",
        *(f"{OURS} over {side}: {in_words(times.speedup(OURS, side))}"
          for side in times.rates if side != OURS),
        *(f"{side}: left out, {reason}" for side, reason in times.stopped.items()),
        "compiled sides came first: kernels that they tuned were in torch's caches",
        *times.result.climb.notes,
    ]  # fmt: skip
    command = ("python", "-m", "vision_bench", *sys.argv[1:])
    return Record.create(f"bench-modules-{name}", hardware, values, command, notes)


def lines_of(name: str, times: VisionTimes) -> list[str]:
    lines = [f"{name}: {times.result.climb.headline}"]
    for side in times.rates:
        over = "" if side == GIVEN else f", {in_words(times.speedup(side, GIVEN))} as given"
        ready = f"ready after {times.ready_s[side]:.0f} s"
        call_ms = 1e3 * times.call_s(side)
        lines.append(f"  {side}: {call_ms:.3f} ms{over}, error {times.errors[side]:.1e}, {ready}")
    return lines + [f"  {side}: left out, {reason}" for side, reason in times.stopped.items()]


def times_table(results: Mapping[str, VisionTimes], mode: str) -> Table:
    peers = (mode, f"bf16, {mode}")
    table = Table(title=f"ms a call, beside torch.compile(mode={mode!r}) in the same run")
    for column in ("model", GIVEN, *peers, OURS, *(f"{OURS} over {side}" for side in peers),
                   "error", "ready after"):  # fmt: skip
        table.add_column(column)
    for name, times in results.items():
        shown = [f"{1e3 * times.call_s(side):.3f}" if side in times.rates else
                 "not ready" if side in times.stopped else "–"
                 for side in (GIVEN, *peers, OURS)]  # fmt: skip
        over = [in_words(times.speedup(OURS, side)) if side in times.rates else "–"
                for side in peers]  # fmt: skip
        error, ready = f"{times.errors[OURS]:.1e}", f"{times.ready_s[OURS]:.0f} s"
        table.add_row(name, *shown, *over, error, ready)
    return table


def rungs_table(results: Mapping[str, VisionTimes]) -> Table:
    table = Table(title="what came of rungs for vision models")
    for column in ("rung", "model", "outcome", "predicted", "achieved", "why"):
        table.add_column(column)
    for rung in VISION_RUNGS:
        for name, times in results.items():
            for outcome in times.result.rungs:
                if outcome.name == rung and outcome.status != "not applicable":
                    predicted = outcome.predicted
                    table.add_row(
                        rung, name, outcome.status,
                        "–" if predicted is None else f"{predicted.speedup:.2f}×",
                        "–" if outcome.achieved is None else in_words(outcome.achieved),
                        outcome.reason,
                    )  # fmt: skip
    return table


def times_of_all(
    names: Sequence[str], cases: Mapping[str, VisionCase], args: argparse.Namespace
) -> dict[str, VisionTimes]:
    """What is left of the limit is divided among the models that are left: a case without compiled
    sides gets a fifth of what one with them gets.
    """
    ends_at = time.monotonic() + args.limit
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    hardware = measured(device, from_host=device.type != "cpu")
    results: dict[str, VisionTimes] = {}
    for number, name in enumerate(names):
        case = cases[name]
        parts = [5 if cases[each].has_peers else 1 for each in names[number:]]
        part_s = max(ends_at - time.monotonic(), 1.0) * parts[0] / sum(parts)
        results[name] = times = timed_beside(
            case, device, hardware,
            mode=args.mode, part_s=part_s, rounds=args.rounds,
        )  # fmt: skip
        print("\n".join(lines_of(name, times)), flush=True)
        if args.save is not None:  # after each: what is done is kept
            print(f"  {record_of(name, times, hardware, case).save(args.save)}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="vision_bench", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(LARGE)}; all where none is named")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="torch.compile's")
    parser.add_argument("--limit", type=float, default=220.0, help="seconds for all of it, about")
    parser.add_argument("--rounds", type=int, default=2 * MIN_ROUNDS, help="at least 5")
    parser.add_argument("--save", type=Path, help="folder for the records")
    args = parser.parse_args()
    cases = SMALL if args.small else LARGE
    unknown = sorted(set(args.models) - set(cases))
    if unknown:
        parser.error(f"no model is called {unknown[0]}; models are {', '.join(cases)}")
    results = times_of_all(args.models or list(cases), cases, args)
    console = Console(width=200)
    console.print(times_table(results, args.mode))
    console.print(rungs_table(results))


if __name__ == "__main__":
    main()
