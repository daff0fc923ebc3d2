"""The regression guard: a folder that a climb left is measured again, and fails when its speed or
its quality fell beyond noise since the record, or when the rate that it was proved to hold within a
latency bound is not held any more. A line for a CI job.

    result = check_folder(Path("out"))
    result.problems                  # empty: all is as it was

Speeds of two days differ by more than rounds of one: a fall counts when the 95% interval of the
ratio ends below 1 and the ratio itself is below 1 - ALLOWED_FALL.

A control (measuring/control.py) is timed when the record is written and beside the rounds here.
What a busy machine takes from the control is divided out of the speed, and widens its interval; a
rate that is not held there is a remark, for waiting times do not grow in proportion.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch

from ridgeline.data.workload import Workload
from ridgeline.errors import UsageError
from ridgeline.hardware import detect
from ridgeline.ladder.climbing.kept_level import KeptLevel, level_problems, level_words
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.measuring.spec import workload_from
from ridgeline.ladder.outcome import Quality, RateProof, Speedup
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.reporting.folder import CHECK
from ridgeline.ladder.reporting.words import BUSY, noise_factor
from ridgeline.ladder.state import ClimbState, ClimbSubject
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.models.shapes import describe_shape
from ridgeline.progress import Progress
from ridgeline.quality.gate import QualityBounds
from ridgeline.quality.intervals import t_quantile
from ridgeline.recipe import Recipe

ALLOWED_FALL = 0.05
ALLOWED_RISE = 1.05  # of the KL divergence, where it had no interval
DOUBT = 0.5  # of what the control lost: how far a workload's loss may be from it


@dataclass(frozen=True)
class Checked:
    folder: str
    speed: Speedup | None  # now over then, less what the machine lost; None: no rounds
    control: Speedup | None  # of a fixed computation, now over then; None: not in the record
    quality: Quality | None
    quality_before: Quality | None
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    proof: RateProof | None = None  # of the rate within a latency bound, where the record has one
    proof_words: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_folder(
    folder: Path,
    *,
    device: str = "auto",
    rounds: int = MIN_ROUNDS,
    quality: bool = True,
    progress: Progress | None = None,
) -> Checked:
    saved = read_saved(folder)
    hardware = detect(saved["device"] if device == "auto" else device)
    subject = _subject(saved, hardware.device)
    state = ClimbState(Recipe.load(folder), saved["loop"], None if saved["shape"] else str(folder))
    remarks = []
    if hardware.name != saved["device_name"]:
        remarks.append(f"the record is of {saved['device_name']}, this is {hardware.name}")
    measured, bounds = Measured(**saved["measured"]), QualityBounds(**saved["bounds"])
    workload: Workload = workload_from(saved["workload"])
    level = None if saved.get("level") is None else KeptLevel.from_json(saved["level"])
    progress = progress or _nothing
    with (
        tempfile.TemporaryDirectory() as work,
        Processes(
            subject,
            workload,
            saved["goal"],
            hardware,
            Path(work),
            measured=measured,
            bounds=bounds,
            latency=None if level is None else level.bound,
            trace=None if level is None else level.trace,
        ) as bench,
    ):
        progress("rounds", 0, 3)
        control = Control(hardware.device)
        recorded, rates = recorded_control(saved, hardware.device), list[float]()
        if saved["part"] is None:
            control.time(rounds)
        else:
            part = WorkloadPart.from_json(saved["part"])
            rates = bench.rates(state, part, rounds, beside=control.time)
        machine = machine_of(recorded, control.rates)
        speed = corrected(unpaired(saved["rates"], rates), machine) if rates else None
        proof = None
        if level is not None:
            progress(f"{level.rate:.3g} requests/s for {level.seconds:.0f} s", 1, 3)
            proof = bench.prove(state, level.rate, level.seconds)
        before = None if saved["quality"] is None else Quality(**saved["quality"])
        now = None
        if before is not None and quality:
            progress("quality", 2, 3)
            bench.let_go()
            now = bench.judge(replace(state, loop="engine"))
    problems = [*speed_problems(speed), *quality_problems(before, now)]
    remarks += control_remarks(recorded, machine)
    words = None
    if level is not None and proof is not None:
        words, late = level_words(level, proof), level_problems(level, proof)
        is_busy = machine is not None and machine.value < 1.0 - ALLOWED_FALL
        (remarks if is_busy else problems).extend(late)
    return Checked(
        folder=str(folder),
        speed=speed,
        control=machine,
        quality=now,
        quality_before=before,
        problems=tuple(problems),
        remarks=tuple(remarks),
        proof=proof,
        proof_words=words,
    )


def _nothing(*_: object) -> None:
    """Nobody wants to know how far it is."""


def read_saved(folder: Path) -> dict[str, Any]:
    path = folder / CHECK
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        missing = FIELDS - document.keys()
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {CHECK}: `ridgeline optimize` did not write it, or the run was "
            "stopped before its final comparison; continue that run with --resume"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if missing:
        raise UsageError(f"{path} lacks {', '.join(sorted(missing))}; climb again")
    return dict(document)


FIELDS = {"model", "shape", "device", "device_name", "goal", "loop", "workload", "part", "rates"}
FIELDS |= {"bounds", "measured", "quality"}


def _subject(saved: dict[str, Any], device: str) -> ClimbSubject:
    if saved["shape"] is not None:
        config = describe_shape(saved["shape"]).config
        return ClimbSubject(saved["shape"], None, saved["shape"], config, device)
    path = Path(saved["model"])
    return ClimbSubject(str(path), path, None, describe(open_checkpoint(path)).config, device)


def unpaired(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """Of rounds that did not take turns: Welch's interval of the difference of logarithms."""
    logs = [[math.log(rate) for rate in rates] for rates in (before, after)]
    parts = [variance(values) / len(values) for values in logs]
    middle, error = fmean(logs[1]) - fmean(logs[0]), math.sqrt(sum(parts))
    weights = sum(part**2 / (len(v) - 1) for part, v in zip(parts, logs, strict=True))
    degrees = 1 if weights == 0 else max(1, int(sum(parts) ** 2 / weights))
    reach = t_quantile(degrees) * error
    value, low, high = (math.exp(log) for log in (middle, middle - reach, middle + reach))
    return Speedup(value, low, high, tuple(before), tuple(after))


def recorded_control(saved: Mapping[str, Any], device: str) -> list[float]:
    """None in a record of before, nor for another kind of device, whose control is another one."""
    is_same = torch.device(saved["device"]).type == torch.device(device).type
    return list(saved.get("control", ())) if is_same else []


def machine_of(recorded: Sequence[float], now: Sequence[float]) -> Speedup | None:
    """How fast the machine itself is, now over then, by the control."""
    return unpaired(recorded, now) if min(len(recorded), len(now)) >= 2 else None


def corrected(speed: Speedup, machine: Speedup | None) -> Speedup:
    """The speed on a machine that is as fast as it was. A control does not suffer exactly as a
    workload does: what is divided out is taken as known to a half of it, and no better than to the
    factor by which the control's own samples differ where the machine was not quiet. A machine that
    became faster corrects nothing, for then no fall is the machine's.
    """
    if machine is None:
        return speed
    lost = min(0.0, math.log(machine.value))
    reaches = [math.log(each.high / each.value) for each in (speed, machine)]
    factor = noise_factor(machine)
    noise = math.log(factor) if factor >= BUSY else 0.0
    middle, reach = math.log(speed.value) - lost, math.hypot(*reaches, noise) - DOUBT * lost
    value, low, high = (math.exp(log) for log in (middle, middle - reach, middle + reach))
    return replace(speed, value=value, low=low, high=high)


def control_remarks(recorded: Sequence[float], machine: Speedup | None) -> list[str]:
    if not recorded:
        return [
            "the record has no control for this device, so a busy machine looks like a slower "
            "recipe; a new run of `ridgeline optimize` writes one"
        ]
    if machine is None:
        return [
            "the control could not be timed here (no memory is left for it), so a busy machine "
            "looks like a slower recipe"
        ]
    runs = f"a fixed computation runs at {machine.value:.2f} of its speed then"
    remarks = []
    if noise_factor(machine) >= BUSY:
        remarks.append(
            f"a machine that is not quiet: samples of one fixed computation differ by a factor of "
            f"{noise_factor(machine):.1f}, and a fall of the speed smaller than that is not seen"
        )
    if machine.value < 1.0 - ALLOWED_FALL:
        remarks.append(
            f"this machine is busier or slower than when the record was written: {runs}, which is "
            "divided out of the speed"
        )
    elif machine.low > 1.0 + ALLOWED_FALL:
        remarks.append(
            f"the record was written on a busier or slower machine: {runs}, which may hide that "
            "the recipe became slower; a new run of `ridgeline optimize` writes a better record"
        )
    return remarks


def speed_problems(speed: Speedup | None) -> list[str]:
    if speed is None or speed.high >= 1.0 or speed.value >= 1.0 - ALLOWED_FALL:
        return []
    return [f"speed fell to {speed.value:.2f} of the record ({speed.low:.2f} to {speed.high:.2f})"]


def quality_problems(before: Quality | None, now: Quality | None) -> list[str]:
    if before is None or now is None:
        return []
    problems = [] if now.problem is None else [now.problem]
    allowed = before.mean_kl_high or before.mean_kl * ALLOWED_RISE
    if now.mean_kl > allowed:
        problems.append(f"mean KL is {now.mean_kl:.5f}, was {before.mean_kl:.5f}")
    return problems
