"""Custom kernels: tiles chosen by measuring on this kind of GPU, and kernels in CUDA C++ built for
it, in the place of Triton's rules of thumb.
"""

from __future__ import annotations

from ridgeline.kernels import autotune
from ridgeline.kernels.extension import find_nvcc
from ridgeline.ladder.rungs.base import Offer, Rung, RungContext
from ridgeline.ladder.rungs.quantize import WEIGHTS


def tuned(context: RungContext) -> Offer | str:
    if context.facts.on_cpu:
        return "on a CPU the fused kernels are its own already"
    if context.state.recipe.tuned:
        return "they are on already"
    name = context.facts.hardware.name
    has_choices, nvcc = bool(autotune.load(name)), find_nvcc()
    if not has_choices and nvcc is None:
        return (
            f"no choices were measured for {name}, and there is no nvcc to build kernels "
            "with; run `ridgeline kernels tune`"
        )
    known = "measured choices" if has_choices else "no measured choices"
    built = "kernels in CUDA C++ are built" if nvcc else "no nvcc, so Triton alone"
    return Offer({"tuned": True}, f"{known} for {name}; {built}")


# Codes in few bits may be slower than plain weights by a rule of thumb: this comes before schemes,
# and once more after one, where it gave nothing before.
RUNGS = (
    Rung(
        "tuned",
        "custom kernels",
        "kernels tuned for this GPU",
        tuned,
        leads=True,
        again_after=tuple(WEIGHTS),
    ),
)
