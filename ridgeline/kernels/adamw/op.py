"""What the registry knows of AdamW: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.adamw import AdamWUpdate, reference
from ridgeline.kernels.adamw.state import AdamWFormat, AdamWState, AdamWStep, new_state
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamWStep(lr=1e-3, step=3, weight_decay=0.1, seed=7)


def make(
    sizes: tuple[int, ...],
    format: AdamWFormat,
    grad_dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    """Weights with moments as after some steps, made by taking one."""
    states, grads = [], []
    for salt, size in enumerate(sizes):
        master = normal((size,), FP32, device, generator)
        dtype = FP32 if format.weight == "fp32" else BF16
        states.append(new_state(master.to(dtype), format, master, salt))
        grads.append(normal((size,), grad_dtype, device, generator, scale=0.1))
    earlier = [normal(tuple(grad.shape), FP32, device, generator) for grad in grads]
    clip = torch.tensor(0.7, device=device)
    reference.adamw_(states, earlier, AdamWStep(lr=1e-3, step=1, seed=7), clip)
    kept: dict[str, Any] = {}  # what a baseline keeps from call to call
    return {"states": states, "grads": grads, "step": STEP, "clip": clip, "kept": kept}


def case(
    sizes: tuple[int, ...],
    weight: str = "exact",
    moments: str = "bf16",
    grad_dtype: torch.dtype = BF16,
    stochastic: bool = True,
) -> Case:
    format = AdamWFormat(weight, moments, stochastic and weight == "bf16", stochastic)  # type: ignore[arg-type]
    total = f"{len(sizes)} tensors of {sum(sizes)}" if len(sizes) > 3 else "+".join(map(str, sizes))
    return Case(
        label(total, weight, f"moments {moments}", grad_dtype, not stochastic and "nearest"),
        partial(make, sizes, format, grad_dtype),
        FP32,
    )


def parts(state: AdamWState) -> list[Tensor]:
    """All that a step changes, as integers: it must be equal to the bit."""
    tensors = (
        state.weight,
        state.remainder,
        state.first,
        state.second,
        state.first_scale,
        state.second_scale,
    )
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [each.view(whole[each.element_size()]) for each in tensors if each is not None]


def defined(states: list[AdamWState], kept: dict[str, Any], **inputs: Any) -> tuple[Tensor, ...]:
    lost = reference.adamw_(states, **inputs)
    return lost, *(part for state in states for part in parts(state))


def launched(
    states: list[AdamWState],
    grads: list[Tensor],
    step: AdamWStep,
    clip: Tensor,
    kept: dict[str, Any],
) -> tuple[Tensor, ...]:
    """As an optimizer does it: the table of addresses and the step's numbers are there already."""
    if "optimizer" not in kept:
        kept["optimizer"], kept["numbers"] = AdamWUpdate(states), step.numbers().to(clip.device)
    lost = kept["optimizer"].launch(states, grads, kept["numbers"], clip)
    return lost, *(part for state in states for part in parts(state))


def cost(states: list[AdamWState], grads: list[Tensor], **_: Any) -> OpCost:
    kept = sum(part.nbytes for state in states for part in parts(state))
    return OpCost(kept + sum(grad.nbytes for grad in grads), kept)


def fused(
    weights: list[Tensor], grads: list[Tensor], step: AdamWStep, clip: Tensor, kept: dict[str, Any]
) -> None:
    """torch's fused AdamW, with moments in the weights' dtype that the first call makes."""
    if "steps" not in kept:
        kept["moments"] = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
        kept["steps"] = [torch.tensor(float(step.step), device=clip.device) for _ in weights]
        kept["inverse"] = clip.reciprocal()
    means, squares = kept["moments"]
    torch._fused_adamw_(
        weights,
        grads,
        means,
        squares,
        [],
        kept["steps"],
        lr=step.lr,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=kept["inverse"],
    )


def fused_fp32(
    states: list[AdamWState],
    grads: list[Tensor],
    step: AdamWStep,
    clip: Tensor,
    kept: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Over an fp32 master, with the copies from and to bf16: a step without the remainder."""
    own = kept.setdefault("fp32", {})
    if not own:
        own["masters"] = [state.weight.float() for state in states]
    fused(own["masters"], [grad.float() for grad in grads], step, clip, own)
    torch._foreach_copy_([state.weight for state in states], own["masters"])
    return tuple(own["masters"])


def fused_bf16(
    states: list[AdamWState],
    grads: list[Tensor],
    step: AdamWStep,
    clip: Tensor,
    kept: dict[str, Any],
) -> tuple[Tensor, ...]:
    """In bf16 throughout: less traffic, and small updates are lost."""
    weights = [state.weight for state in states]
    fused(weights, grads, step, clip, kept.setdefault("bf16", {}))
    return tuple(weights)


AWKWARD = (1, 255, 257, 3000)
SMALL = [
    case(AWKWARD, "exact", "bf16"),
    case((20000, 5), "fp32", "fp32", FP32),  # more than a chunk
    case(AWKWARD, "exact", "fp32", FP32),
    case(AWKWARD, "exact", "8-bit"),
    case(AWKWARD, "exact", "8-bit", stochastic=False),
    case(AWKWARD, "bf16", "bf16"),
    case(AWKWARD, "bf16", "bf16", stochastic=False),
    case((700,), "bf16", "8-bit", FP16),
]
MANY = tuple([2048] * 33 + [2048 * 2048, 16384 * 2048, 8192 * 2048] * 4 + [1_000_003])
FORMATS = [("exact", "bf16"), ("exact", "8-bit"), ("exact", "fp32"), ("bf16", "bf16")]
LARGE = [case(MANY, weight, moments) for weight, moments in FORMATS]
# A quarter of Llama 3.2's 1B: enough that nothing stays in a cache.
BENCH = [
    case((128256 * 512, *([2048 * 2048, 16384 * 2048, 8192 * 2048] * 4), *([2048] * 33)), *format)
    for format in FORMATS
]
COMPILE = [case((4096,), weight, moments) for weight, moments in FORMATS] + [
    case((4096,), "fp32", "fp32", FP32)
]

OP = Op(
    name="adamw",
    summary="AdamW with an exact master in bf16 + 16 bits, moments of 8 to 32 bits",
    **functions(defined, launched, cost, fused_fp32=fused_fp32, fused_bf16=fused_bf16),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
