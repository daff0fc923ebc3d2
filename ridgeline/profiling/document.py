"""A profile as one document: what programs read, and what the table and the page are drawn from.

result = document(header, steps, advice, gap, hardware)
result["steps"][0]["rows"][0]["share_of_ceiling"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ridgeline.hardware import Hardware
from ridgeline.hardware.units import over_words
from ridgeline.profiling.model_profile import StepProfile
from ridgeline.profiling.placing import PlacedOp
from ridgeline.profiling.predicting.next_steps import Advice
from ridgeline.profiling.predicting.prediction import GapPart
from ridgeline.profiling.tracing.counters import Counted

PARTS = {  # of a step: the words of the division, and what they mean
    "matrices": "products with weights",
    "attention": "attention over the keys and values",
    "other kernels": "norms, rotations, activations, sampling",
    "communication": "sums and gathers between ranks, and waiting for the slowest",
    "copies": "between host and device, and on it",
    "gaps": "between kernels: launches, or on a CPU many small calls",
    "host": "planning, sending, receiving: the device waits",
}

TRAINING_PARTS = {  # of a training step
    "products": "with weights, forward and for both gradients, and computed again",
    "attention": "of tokens over those before them, and its gradients",
    "loss": "passes over the head's logits",
    "element-wise": "norms, rotations, activations, embeddings, codes",
    "optimizer": "the gradients' norm, and AdamW's pass",
    "communication": "between ranks, and waiting for the slowest, where nothing else runs",
    "copies": "between host and device, between dtypes",
    "host": "between kernels and ops: launches, Python, autograd",
}


def document(
    header: Mapping[str, Any],  # model, loop, form: what was profiled
    steps: Sequence[StepProfile],
    advice: Sequence[Advice],
    gap: Sequence[GapPart],  # why it is not at the limit, the largest part first
    hardware: Hardware,
    counted: Counted | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        **header,
        "device": hardware.name,
        "device_type": hardware.device_type,
        "ceilings": ceilings_json(hardware),
        "steps": [step_json(step, counted) for step in steps],
        "gap": [asdict(part) for part in gap],
        "next": [each.to_json() for each in advice],
        "counters": None if counted is None else counted.tool,
        "notes": [
            *notes,
            *(f"{step.label}: {note}" for step in steps for note in step.division.notes),
            *filter(None, [over_words(_shares(steps))]),
        ],
    }


def _shares(steps: Sequence[StepProfile]) -> dict[str, float | None]:
    """Of limits, by what they are of."""
    several = len({step.phase for step in steps}) < len(steps)
    result: dict[str, float | None] = {}
    for step in steps:
        name = step.label if several else step.phase
        result[f"{name} step"] = step.share_of_limit
        result |= {f"{op.op.name} ({name})": op.share_of_ceiling for op in step.placed}
    return result


def step_json(step: StepProfile, counted: Counted | None = None) -> dict[str, Any]:
    division, timing = step.division, step.timing
    return {
        "phase": step.phase,
        "name": step.phase,
        "label": step.label,
        "step_s": timing.median_s,
        "spread": timing.spread,
        "num_samples": timing.num_samples,
        "tokens_per_s": step.num_tokens / timing.median_s,
        "bytes": step.cost.bytes,
        "flops": step.cost.flops,
        "limit_s": None if step.limit is None else step.limit.seconds,
        "bound": None if step.limit is None else step.limit.bound,
        "ceiling_source": None if step.limit is None else step.limit.ceiling.source,
        "share_of_limit": step.share_of_limit,
        "verdict": step.verdict.kind,
        "sentence": step.verdict.sentence,
        "num_kernels": division.num_kernels,
        "busy_s": division.busy_s,
        "totals": {name: division.parts[name] for name in PARTS},
        "rows": [row_json(placed, counted) for placed in step.placed],
    }


def row_json(placed: PlacedOp, counted: Counted | None) -> dict[str, Any]:
    op, cost = placed.op, placed.cost
    kernels = [_kernel(kernel.name, counted) | vars(kernel) for kernel in op.kernels]
    return {
        "op": op.name,
        "part": op.part,
        "seconds": op.seconds,
        "share": placed.share_of_step,
        "calls": op.num_calls,
        "bytes": None if cost is None else cost.bytes,
        "flops": None if cost is None else cost.flops,
        "matrix_dtype": None if cost is None else cost.matrix_dtype,
        "bytes_per_s": placed.bytes_per_s,
        "flops_per_s": placed.flops_per_s,
        "memory_share": placed.memory_share,
        "matrix_share": placed.matrix_share,
        "link_share": placed.link_share,
        "share_of_ceiling": placed.share_of_ceiling,
        "verdict": placed.verdict,
        "kernels": kernels,
        **_weighted(kernels),
    }


def _kernel(name: str, counted: Counted | None) -> dict[str, Any]:
    return {} if counted is None else {"counters": counted.of(name)}


def _weighted(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of an op's kernels, by their time: occupancy, and what counters say where they were read."""
    result: dict[str, float | None] = {}
    for name in ("occupancy", "dram", "tensor"):
        values = [(kernel["seconds"], _figure(kernel, name)) for kernel in kernels]
        known = [(seconds, value) for seconds, value in values if value is not None]
        total = sum(seconds for seconds, _ in known)
        result[name] = sum(s * v for s, v in known) / total if total > 0 else None
    return result


def _figure(kernel: Mapping[str, Any], name: str) -> float | None:
    """As counted, or the tracer's own estimate."""
    counters = kernel.get("counters") or {}
    value = counters.get(name)
    if value is None and name == "occupancy":
        value = kernel["occupancy"]
    return None if value is None else float(value)


def ceilings_json(hardware: Hardware) -> dict[str, Any]:
    """Those over steps, as far as they are known."""
    keys = ("read_bandwidth", "memory_bandwidth")
    matrices = [f"matrix_{name}" for name in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")]
    known = {key: hardware.ceiling(key) for key in (*keys, *matrices)}
    return {key: ceiling.to_json() for key, ceiling in known.items() if ceiling is not None}
