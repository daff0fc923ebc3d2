"""Tensor cores: 16-bit weights and work, which halve the bytes and go through the matrix units; or
tf32, which keeps fp32 weights and rounds what is multiplied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ridgeline.ladder.rungs.base import Offer, Place, Rung
from ridgeline.quantization.sizes import model_matrices

ALIGNED = 8  # elements that matrix units take in one go


def half(name: str, place: Place) -> Offer | str:
    now = place.filled.dtype
    if now != "fp32":
        return f"the dtype is {now} already, which has the same size and speed"
    if name == "fp16" and place.on_cpu:
        return "a CPU computes fp16 by way of fp32; bf16 is measured"
    if name == "bf16" and _before_ampere(place):
        return f"{place.hardware.architecture} has no bf16 matrix units; fp16 is measured"
    edit: dict[str, Any] = {"dtype": name}
    if place.state.recipe.tf32:
        edit["tf32"] = False
    return Offer(edit, f"half the bytes of fp32; {alignment(place)}")


def tf32(place: Place) -> Offer | str:
    if place.on_cpu:
        return "tf32 is of a GPU's matrix units"
    if place.filled.dtype != "fp32":
        return f"the dtype is {place.filled.dtype}; tf32 is about fp32"
    if place.hardware.ceiling("matrix_tf32") is None:
        return f"{place.hardware.name} has no tf32"
    return Offer({"tf32": True}, f"products of fp32 on matrix units; {alignment(place)}")


def _before_ampere(place: Place) -> bool:
    name = place.hardware.architecture
    return name.startswith("sm_") and name[3:].isdigit() and int(name[3:]) < 80


def alignment(place: Place) -> str:
    """Whether the model's matrices suit the units; those that do not are named."""
    shapes = dict.fromkeys(model_matrices(place.config))
    odd = [shape for shape in shapes if any(size % ALIGNED for size in shape)]
    if not odd:
        return f"all matrices have dims that {ALIGNED} divides"
    named = ", ".join(f"{shape.num_outputs} x {shape.depth}" for shape in odd[:3])
    return f"dims of {named} are not multiples of {ALIGNED}, which is slower"


# Where launches take longer than what they launch, fewer bytes gain nothing until graphs take them
# away.
_AGAIN = ("graphs",)
RUNGS = (
    Rung(
        *("bf16", "tensor cores", "weights and work in bf16", partial(half, "bf16"), True),
        again_after=_AGAIN,
    ),
    Rung(
        *("fp16", "tensor cores", "weights and work in fp16", partial(half, "fp16"), True),
        again_after=_AGAIN,
    ),
    Rung("tf32", "tensor cores", "fp32 products in tf32", tf32, True),
)
