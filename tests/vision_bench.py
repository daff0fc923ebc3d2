"""Vision models under `ridgeline.optimize`, beside torch.compile(mode="max-autotune") of the module
as it is and of its bf16 copy: all in one run, in rounds that take turns, with a record of each
model.

    PYTHONPATH=.:tests python -m vision_bench --save results            # or: make gpu-modules
    PYTHONPATH=.:tests python -m vision_bench vit --small --budget 20   # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vision_models import Branches, SmallConvNet, SmallViT, WindowedEncoder

from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.modules import OptimizedModule, optimize
from ridgeline.ladder.modules.bench import in_words, many_recompiles
from ridgeline.ladder.outcome import Speedup
from ridgeline.profiling.modules.run import measured
from ridgeline.records import Record, Value
from ridgeline.timing import time_host

GIVEN, OURS = "as given", "optimize"
MODES = ("max-autotune", "default")
Call = Callable[[], Any]


@dataclass(frozen=True)
class VisionCase:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


LARGE = {
    "vit": VisionCase(partial(SmallViT, 384, 12, 224, 16, 1000), (1, 3, 224, 224)),
    "conv": VisionCase(partial(SmallConvNet, 64, 8, 1000), (1, 3, 224, 224)),
    "windowed": VisionCase(partial(WindowedEncoder, 384, 8, 512, 16, 8), (1, 3, 512, 512)),
    "branches": VisionCase(partial(Branches, 64), (1, 64, 28, 28)),
}
SMALL = {
    "vit": VisionCase(partial(SmallViT, 64, 2), (1, 3, 32, 32)),
    "conv": VisionCase(partial(SmallConvNet, 16, 2), (1, 3, 32, 32)),
    "windowed": VisionCase(partial(WindowedEncoder, 64, 2), (1, 3, 64, 64)),
    "branches": VisionCase(partial(Branches, 16), (1, 16, 16, 16)),
}


@dataclass(frozen=True)
class VisionTimes:
    rates: Mapping[str, Sequence[float]]  # calls a second of each side, round by round
    errors: Mapping[str, float]  # of outputs, relative to those of the module as it is
    ready_s: Mapping[str, float]  # until a side could be called
    result: OptimizedModule

    def speedup(self, side: str, over: str) -> Speedup:
        return speedup_of(self.rates[over], self.rates[side])


def timed_beside(
    case: VisionCase,
    device: torch.device,
    hardware: Hardware,
    *,
    mode: str = MODES[0],
    budget_s: float = 90.0,
    rounds: int = MIN_ROUNDS,
    round_s: float = 0.2,
) -> VisionTimes:
    """Ours, the module as it is, and compiled ones; those with fullgraph, which raises where
    torch.compile would otherwise run uncompiled.
    """
    module = case.make().eval().to(device)
    torch.manual_seed(1)
    x = torch.randn(case.shape, device=device)
    half, x_half = copy.deepcopy(module).to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.inference_mode():
        expected = module(x).clone()
    ready_s, began = {GIVEN: 0.0}, time.monotonic()
    result = optimize(module, x, budget_s=budget_s, hardware=hardware)
    ready_s[OURS] = time.monotonic() - began
    sides: dict[str, Call] = {GIVEN: partial(module, x), OURS: partial(result, x)}
    errors: dict[str, float] = {}
    with many_recompiles(), torch.inference_mode():
        for name, each, inputs in ((mode, module, x), (f"bf16, {mode}", half, x_half)):
            began = time.monotonic()
            sides[name] = partial(torch.compile(each, mode=mode, fullgraph=True), inputs)
            sides[name]()
            ready_s[name] = time.monotonic() - began
        for name, call in sides.items():
            errors[name] = relative_error(call(), expected)
        rates = rates_in_turns(sides, device, rounds, round_s)
    return VisionTimes(rates, errors, ready_s, result)


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
        *times.result.climb.notes,
    ]  # fmt: skip
    command = ("python", "-m", "vision_bench", *sys.argv[1:])
    return Record.create(f"bench-modules-{name}", hardware, values, command, notes)


def lines_of(name: str, times: VisionTimes) -> list[str]:
    lines = [f"{name}: {times.result.climb.headline}"]
    for side, rates in times.rates.items():
        call_s = 1.0 / sorted(rates)[len(rates) // 2]
        over = "" if side == GIVEN else f", {in_words(times.speedup(side, GIVEN))} as given"
        ready = f"ready after {times.ready_s[side]:.0f} s"
        lines.append(
            f"  {side}: {1e3 * call_s:.3f} ms{over}, error {times.errors[side]:.1e}, {ready}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="vision_bench", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(LARGE)}; all where none is named")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--mode", choices=MODES, default=MODES[0], help="torch.compile's")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each climb")
    parser.add_argument("--rounds", type=int, default=2 * MIN_ROUNDS, help="at least 5")
    parser.add_argument("--save", type=Path, help="folder for the records")
    args = parser.parse_args()
    cases = SMALL if args.small else LARGE
    unknown = sorted(set(args.models) - set(cases))
    if unknown:
        parser.error(f"no model is called {unknown[0]}; models are {', '.join(cases)}")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    hardware = measured(device)
    for name in args.models or cases:
        times = timed_beside(
            cases[name], device, hardware,
            mode=args.mode, budget_s=args.budget, rounds=args.rounds,
        )  # fmt: skip
        print("\n".join(lines_of(name, times)), flush=True)
        if args.save is not None:  # after each: what is done is kept
            print(f"  {record_of(name, times, hardware, cases[name]).save(args.save)}", flush=True)


if __name__ == "__main__":
    main()
