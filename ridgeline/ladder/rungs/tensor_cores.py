"""Tensor cores: 16-bit weights and work, which halve the bytes and go through the matrix units; or
tf32, which keeps fp32 weights and rounds what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ridgeline.ladder.rungs.base import Offer, Rung, RungContext
from ridgeline.quantization.sizes import model_matrices

ALIGNED = 8  # elements that matrix units take in one go


def half(name: str, context: RungContext) -> Offer | str:
    now = context.filled.dtype
    if now != "fp32":
        return f"the dtype is {now} already, which has the same size and speed"
    if name == "fp16" and context.facts.on_cpu:
        return "a CPU computes fp16 by way of fp32; bf16 is measured"
    if name == "bf16" and _before_ampere(context):
        return f"{context.facts.hardware.architecture} has no bf16 matrix units; fp16 is measured"
    if name == "fp16" and not _before_ampere(context) and not _is_outside(context, "bf16"):
        return (
            "as large and as fast as bf16, which kernels are tuned for; tried if that is too coarse"
        )
    edit: dict[str, Any] = {"dtype": name}
    if context.state.recipe.tf32:
        edit["tf32"] = False
    return Offer(edit, f"half the bytes of fp32; {alignment(context)}")


def tf32(context: RungContext) -> Offer | str:
    if context.facts.on_cpu:
        return "tf32 is of a GPU's matrix units"
    if context.filled.dtype != "fp32":
        return f"the dtype is {context.filled.dtype}; tf32 is about fp32"
    if context.facts.hardware.ceiling("matrix_tf32") is None:
        return f"{context.facts.hardware.name} has no tf32"
    return Offer({"tf32": True}, f"products of fp32 on matrix units; {alignment(context)}")


def _is_outside(context: RungContext, name: str) -> bool:
    """Whether it was measured, and outside the quality bound."""
    outcome = context.outcomes.get(name)
    quality = None if outcome is None else outcome.quality
    return quality is not None and quality.problem is not None


def _before_ampere(context: RungContext) -> bool:
    name = context.facts.hardware.architecture
    return name.startswith("sm_") and name[3:].isdigit() and int(name[3:]) < 80


def alignment(context: RungContext) -> str:
    """Whether the model's matrices suit the units; those that do not are named."""
    shapes = dict.fromkeys(model_matrices(context.facts.config))
    odd = [shape for shape in shapes if any(size % ALIGNED for size in shape)]
    if not odd:
        return f"all matrices have dims that {ALIGNED} divides"
    named = ", ".join(f"{shape.num_outputs} x {shape.depth}" for shape in odd[:3])
    return f"dims of {named} are not multiples of {ALIGNED}, which is slower"


def _rung(name: str, title: str, offer: Callable[[RungContext], Offer | str]) -> Rung:
    """Without graphs a GPU may do nothing but wait for launches, which hides all of the gain."""
    return Rung(name, "tensor cores", title, offer, True, again_after=("graphs",), near=0.5)


RUNGS = (
    _rung("bf16", "weights and work in bf16", partial(half, "bf16")),
    _rung("fp16", "weights and work in fp16", partial(half, "fp16")),
    _rung("tf32", "fp32 products in tf32", tf32),
)
