"""A climb as records: the model before, after, and each rung that was measured, stamped like every
other record, with clocks and power as they were while rounds ran.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks
from ridgeline.ladder.outcome import Figures, HeldRate, RungOutcome, Speedup
from ridgeline.ladder.reporting.result import Climb
from ridgeline.records import Record, Value


def climb_records(climb: Climb, hardware: Hardware, clocks: Clocks | None) -> list[Record]:
    stem = f"optimize-{Path(climb.model).name.removesuffix('.gguf')}-{climb.goal}"
    named = {
        f"{stem}-before": figure_values(climb.before.figures),
        f"{stem}-after": figure_values(climb.after.figures) | total_values(climb),
    }
    if climb.plain is not None:
        named[f"{stem}-plain-loop"] = plain_values(climb.plain)
    for held in () if climb.levels is None else climb.levels.tried:
        named[f"{stem}-rate-of-{held.name.replace(' ', '-')}"] = rate_values(held)
    for rung in climb.rungs:
        if rung.achieved is not None:
            named[f"{stem}-{rung.name}"] = rung_values(rung)
    return [
        Record.create(name, hardware, values, climb.command, climb.notes, clocks)
        for name, values in named.items()
    ]


def rate_values(held: HeldRate) -> dict[str, Value]:
    """The highest rate within the latency bound, and the run that proves it."""
    rates = {"held_rate": held.rate, "failed_rate": held.failed_rate}
    values = {name: Value(rate, "1/s") for name, rate in rates.items() if rate is not None}
    if held.proof is None:
        return values
    proof = asdict(held.proof)
    units = {"rate": "1/s", "num_requests": "1", "num_kept": "1"}
    return values | {
        f"proof_{name.removesuffix('_s')}": Value(float(value), units.get(name, "s"))
        for name, value in proof.items()
        if value is not None
    }


def figure_values(figures: Figures) -> dict[str, Value]:
    rate = Value(figures.output_tokens_per_s, "token/s")
    values = {"output_tokens_per_s": rate, "weight_bytes": Value(float(figures.weight_bytes), "B")}
    for name in ("first_token_s", "per_output_token_s", "request_s"):
        seconds = getattr(figures, name)
        if seconds is not None:
            values[name.removesuffix("_s")] = Value(seconds, "s")
    if figures.share_of_limit is not None:
        values["share_of_limit"] = Value(figures.share_of_limit, "1")
    return values


def total_values(climb: Climb) -> dict[str, Value]:
    """`speedup` is the estimate from paired rounds, `speedup_of_rates` what the headline shows."""
    if climb.total is None or climb.speedup is None:
        return {}
    return {**speedup_values(climb.total), "speedup_of_rates": Value(climb.speedup, "1")}


def plain_values(speedup: Speedup) -> dict[str, Value]:
    """The plain loop's own rate, and the answer's speed over it in the same rounds."""
    rates, count = sorted(speedup.before), len(speedup.before)
    return {
        "rate": Value(rates[count // 2], "token/s", num_samples=count),
        "answer_over_it": Value(speedup.value, "1", num_samples=count),
        "answer_over_it_low": Value(speedup.low, "1"),
        "answer_over_it_high": Value(speedup.high, "1"),
    }


def speedup_values(speedup: Speedup) -> dict[str, Value]:
    rates = sorted(speedup.after)
    spread = (rates[-1] - rates[0]) / rates[len(rates) // 2]
    count = len(speedup.before)
    return {
        "speedup": Value(speedup.value, "1", num_samples=count),
        "speedup_low": Value(speedup.low, "1"),
        "speedup_high": Value(speedup.high, "1"),
        "rate": Value(rates[len(rates) // 2], "token/s", spread=spread, num_samples=count),
    }


def rung_values(rung: RungOutcome) -> dict[str, Value]:
    assert rung.achieved is not None, "a rung that was measured"
    values = speedup_values(rung.achieved) | {"seconds": Value(rung.seconds, "s")}
    if rung.predicted is not None:
        values["predicted"] = Value(rung.predicted.speedup, "1")
    if rung.quality is not None:
        values["mean_kl"] = Value(rung.quality.mean_kl, "nat")
        values["perplexity_increase"] = Value(rung.quality.ppl_increase, "1")
    return values
