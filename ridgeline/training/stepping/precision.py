"""What a precision means: the dtype that the model computes in, and how its weights are kept.

An update is far smaller than a bf16 weight's last digit: rounded to the nearest it would be lost
(weight 1.0, lr 1e-5: 100 steps move nothing). `bf16` therefore keeps the fp32 weight exactly, as
the bf16 weight and the 16 bits that are missing; `bf16-stochastic` keeps nothing beside it and
rounds up or down by chance, which is right in the mean; `bf16-nearest` is what loses updates.

    weights = Weights(dict(model.named_parameters()), PRECISIONS["bf16"])
    weights.master("embed.weight")          # fp32, what the optimizer changes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ridgeline.errors import NumericsError, UsageError
from ridgeline.hardware import detect
from ridgeline.kernels.adamw import AdamWFormat, AdamWState, joined, new_state
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.rows_to_fp8 import Scaling
from ridgeline.training.config import Moments, Precision
from ridgeline.training.stepping.gradients import local_tensor

VALUES = torch.float8_e4m3fn
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MOMENTS = {"fp32": FP32, "bf16": BF16}  # those of 8 bits have scales beside them


@dataclass(frozen=True)
class PrecisionPlan:
    dtype: torch.dtype  # of the model's weights and activations
    format: AdamWFormat  # of what the optimizer keeps
    uses_tf32: bool = False  # products of fp32 on tensor cores, with 10 bits
    fp8: Scaling | None = None  # products of layers in fp8; the head's and the embedding's are not
    scales_loss: bool = False  # fp16 ends at 65,504, and below at 6e-8
    has_copies: bool = False  # the model computes with a rounded copy of the optimizer's weights

    def with_moments(self, moments: Moments) -> PrecisionPlan:
        if moments == "auto":
            return self
        return replace(self, format=replace(self.format, moments=moments))

    def stored(self) -> dict[str, torch.dtype]:
        """What `Weights.tensors` has for each parameter, where it has the parameter's shape."""
        moments = MOMENTS[self.format.moments]
        kinds = {"first": moments, "second": moments}
        if self.format.weight == "exact":
            kinds["remainder"] = torch.int16
        return kinds | ({"master": FP32} if self.has_copies else {})


EXACT = AdamWFormat("exact", "bf16")
PLAIN = AdamWFormat("fp32", "fp32")
PRECISIONS: dict[Precision, PrecisionPlan] = {
    "fp32": PrecisionPlan(FP32, PLAIN),
    "tf32": PrecisionPlan(FP32, PLAIN, uses_tf32=True),
    "bf16": PrecisionPlan(BF16, EXACT),
    "bf16-stochastic": PrecisionPlan(BF16, AdamWFormat("bf16", "bf16", stochastic_weight=True)),
    "bf16-nearest": PrecisionPlan(BF16, AdamWFormat("bf16", "bf16")),
    "fp16": PrecisionPlan(FP16, PLAIN, scales_loss=True, has_copies=True),
    "fp8": PrecisionPlan(BF16, EXACT, fp8="tensor"),
    "fp8-row": PrecisionPlan(BF16, EXACT, fp8="row"),
}


def check_precision(precision: Precision, device: str) -> None:
    """That this device has it."""
    plan = PRECISIONS[precision]
    if plan.uses_tf32 and device == "cpu":
        raise UsageError("precision tf32 requires a GPU; use --precision fp32")
    if plan.fp8 is not None and not has_fp8(device):
        name = "a CPU" if device == "cpu" else detect(device).name
        raise UsageError(
            f"precision {precision} requires a GPU with fp8 (NVIDIA from sm_89 on), and this is "
            f"{name}; use --precision {'fp32' if device == 'cpu' else 'bf16'}"
        )


def has_fp8(device: str) -> bool:
    """In the format that fp8.py has."""
    return device != "cpu" and target_of(torch.empty(0, device=device)).fp8 == VALUES


class Weights:
    """Parameters that are learned, with what the optimizer keeps for each. They come in fp32 and
    leave in the dtype that the model computes in. A tied table stands once.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: PrecisionPlan,
        masters: Mapping[str, Tensor] | None = None,
        salts: Mapping[str, int] | None = None,
    ) -> None:
        """With `masters`, which have the fp32 values of what lies on this rank, parameters have the
        plan's dtype already, and memory that stays theirs. Random roundings differ by `salts`: of
        copies on several ranks they must not.
        """
        self.parameters = dict(parameters)
        self.plan = plan
        if masters is None:
            assert {each.dtype for each in parameters.values()} == {FP32}
            masters = {}
            for name, parameter in self.parameters.items():
                masters[name] = parameter.detach()
                if plan.dtype != FP32:
                    parameter.data = torch.empty_like(masters[name], dtype=plan.dtype)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.local = {name: local_tensor(each) for name, each in self.parameters.items()}
        self.states: dict[str, AdamWState] = {
            name: self._state(
                self.local[name], masters[name], number if salts is None else salts[name]
            )
            for number, name in enumerate(self.parameters)
        }

    @torch.no_grad()
    def _state(self, own: Tensor, master: Tensor, salt: int) -> AdamWState:
        if self.plan.has_copies:
            own.copy_(master)
            return new_state(master, self.plan.format, salt=salt)
        if self.plan.dtype == FP32:
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
            return new_state(own, self.plan.format, salt=salt)
        return new_state(own, self.plan.format, master, salt)

    @property
    def num_elements(self) -> int:
        return sum(each.numel() for each in self.local.values())

    def master(self, name: str) -> Tensor:
        """In fp32, as the optimizer has it."""
        state = self.states[name]
        if state.remainder is None:
            return state.weight.float()
        return joined(state.weight, state.remainder)

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Into the model, where it computes with copies."""
        if self.plan.has_copies:
            torch._foreach_copy_(
                list(self.local.values()), [state.weight for state in self.states.values()]
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds besides the model's weights, by stored name: the tensors
        themselves.
        """
        for name, state in self.states.items():
            yield f"first.{name}", state.first
            yield f"second.{name}", state.second
            if state.first_scale is not None and state.second_scale is not None:
                yield f"first_scale.{name}", state.first_scale
                yield f"second_scale.{name}", state.second_scale
            if state.remainder is not None:
                yield f"remainder.{name}", state.remainder
            if self.plan.has_copies:
                yield f"master.{name}", state.weight


class LossScale:
    """What the loss is multiplied by in fp16, so that small gradients are not lost. Halved when
    they overflow, doubled after many steps in which they did not.
    """

    GROWTH_STEPS = 2000
    LARGEST = 2.0**24
    SMALLEST = 2.0**-12

    def __init__(self, value: float = 2.0**16, num_good: int = 0) -> None:
        self.value = value
        self.num_good = num_good  # steps since it changed

    def after(self, is_finite: bool) -> None:
        if not is_finite:
            self.value, self.num_good = self.value / 2, 0
            if self.value < self.SMALLEST:
                raise NumericsError(
                    "the gradients overflow fp16 however small the loss is scaled; use precision "
                    "bf16 or fp32, or a smaller lr"
                )
            return
        self.num_good += 1
        if self.num_good == self.GROWTH_STEPS:
            self.value, self.num_good = min(self.value * 2, self.LARGEST), 0
