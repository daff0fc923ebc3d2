"""Why work is not at the hardware's limit, in words and as the parts of a bar: for the report of a
climb and for a profile.

    gap_sentence(parts)         # "Of the time in steps, 61.0% is what bytes and FLOPs take …"
    gap_rows(parts, on_cpu=True)
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.hardware.units import human, percent
from ridgeline.profiling.drawing import BarPart
from ridgeline.profiling.predicting.prediction import GapPart

NAMED = 3  # parts that have a name of their own
LIMIT = "the hardware's limit"
CAUSES = {
    "matrices": "products with weights run below the ceiling",
    "attention": "attention runs below the ceiling",
    "other kernels": "norms, rotations, activations and sampling, which the limit does not count",
    "gaps": "the device waits between kernels until the next is launched",
    "host": "the device waits while the host plans, sends and receives",
    "copies": "copies between host and device, and on it",
    "products": "products run below the ceiling, or are computed twice",
    "loss": "passes over logits, which the limit does not count",
    "element-wise": "norms, rotations, activations and embeddings, which the limit does not count",
    "optimizer": "the gradients' norm and AdamW, which the limit does not count",
    "communication": "sums and gathers between ranks, waiting for the slowest included",
}
ON_CPU = {
    "gaps": "between kernels: calls from Python, each with little work",
    "host": "planning, sending and receiving",
}


def gap_sentence(parts: Sequence[GapPart]) -> str:
    """The largest parts, which come first; empty where nothing is known of the gap."""
    if not parts:
        return ""
    largest = [f"{_name(parts, part)} {percent(part.share)}" for part in parts[:NAMED]]
    listed = ", ".join(largest[:-1]) + f" and {largest[-1]}" if largest[1:] else largest[0]
    return (
        f"Of the time in steps, {percent(limit_share(parts))} is what bytes and FLOPs take at this "
        f"machine's ceilings. The largest parts of the rest are {listed}."
    )


def limit_share(parts: Sequence[GapPart]) -> float:
    """Of the time in steps: what is left of it without the gap."""
    return max(0.0, 1.0 - sum(part.share for part in parts))


def gap_rows(parts: Sequence[GapPart], *, on_cpu: bool) -> list[BarPart]:
    """The limit, the largest parts of the gap, and the rest of it: they add up to 1."""
    named, others = parts[:NAMED], parts[NAMED:]
    rows = [BarPart(LIMIT, limit_share(parts), "bytes and FLOPs at the ceilings")]
    rows += [BarPart(_name(parts, part), part.share, _why(part, on_cpu)) for part in named]
    if others:
        names = dict.fromkeys(part.name for part in others)
        rows.append(BarPart("the rest", sum(part.share for part in others), ", ".join(names)))
    return rows


def _name(parts: Sequence[GapPart], part: GapPart) -> str:
    """With its phase, where there are several."""
    phases = {each.phase for each in parts}
    return f"{part.name} ({part.phase})" if len(phases) > 1 else part.name


def _why(part: GapPart, on_cpu: bool) -> str:
    cause = (ON_CPU if on_cpu else {}).get(part.name) or CAUSES.get(part.name, "")
    took = f"{human(part.step_s, 's')} of a {part.phase} step"
    if part.least_s > 0:
        took += f", {human(part.least_s, 's')} would do"
    return f"{cause}: {took}" if cause else took
