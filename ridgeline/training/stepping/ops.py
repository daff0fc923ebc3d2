"""The element-wise passes of a training step, forward and backward: one kernel each, in C++ on a
CPU; plain torch where there is no compiler. fused.py puts products around them.

A pass has a backward of its own here, not through autograd, so that who calls it decides what is
kept for it and what is computed again.

    ops = ops_for(x_TD.device)
    normed_TD, hidden_TD = ops.norm(update_TD, gain, residual_TD)

Letters: T tokens, D hidden size, F MLP size, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation import Activation
from ridgeline.kernels.gated_activation import cpu as host_activation
from ridgeline.kernels.gated_activation import reference as plain_activation
from ridgeline.kernels.host_library import is_loaded
from ridgeline.kernels.rms_norm import cpu as host_norm
from ridgeline.kernels.rms_norm import reference as plain_norm
from ridgeline.kernels.rotary import Angles
from ridgeline.kernels.rotary import cpu as host_rotary
from ridgeline.kernels.rotary import reference as plain_rotary
from ridgeline.models.transformer import RMSNorm


@dataclass(frozen=True)
class Gain:
    """What a norm has besides its input."""

    weight_D: Tensor
    eps: float
    offset: float

    @staticmethod
    def of(norm: RMSNorm) -> Gain:
        return Gain(norm.weight, norm.eps, norm.offset)


class TrainingOps(Protocol):
    def norm(self, x_TD: Tensor, gain: Gain, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normed sum of x and the residual, and that sum."""

    def norm_backward(
        self, hidden_TD: Tensor, gain: Gain, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients for the sum, of which `grad_hidden_TD` is a part, and for the weight."""

    def activation(self, gate_up_T2F: Tensor, kind: Activation) -> Tensor: ...

    def activation_backward(
        self, gate_up_T2F: Tensor, grad_TF: Tensor, kind: Activation, remakes: bool = False
    ) -> Tensor:
        """The gradient for gate and up. With `remakes` **grad is overwritten** by the activation's
        result, in the same pass.
        """

    def rotate(
        self, x_TNH: Tensor, angles: Angles, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Heads turned by angles, or back; `out` may be x itself."""


class PlainOps:
    def norm(self, x_TD: Tensor, gain: Gain, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        result = plain_norm.rms_norm(x_TD, gain.weight_D, gain.eps, gain.offset, residual_TD)
        if isinstance(result, Tensor):
            return result, x_TD
        normed_TD, hidden_TD = result
        return normed_TD, hidden_TD

    def norm_backward(
        self, hidden_TD: Tensor, gain: Gain, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, grad = hidden_TD.float(), grad_TD.float()
        scale = (x.square().mean(-1, keepdim=True) + gain.eps).rsqrt()
        weight = gain.weight_D.float() + gain.offset if gain.offset else gain.weight_D.float()
        normed = x * scale
        along = grad * normed
        grad_weight = along.flatten(0, -2).sum(0)
        mean = torch.mv(along.flatten(0, -2), weight).view(scale.shape) / x.shape[-1]
        grad_x = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
        if grad_hidden_TD is not None:
            grad_x += grad_hidden_TD
        return grad_x.to(hidden_TD.dtype), grad_weight.to(gain.weight_D.dtype)

    def activation(self, gate_up_T2F: Tensor, kind: Activation) -> Tensor:
        result = plain_activation.gated_activation(gate_up_T2F, kind)
        assert isinstance(result, Tensor)
        return result

    def activation_backward(
        self, gate_up_T2F: Tensor, grad_TF: Tensor, kind: Activation, remakes: bool = False
    ) -> Tensor:
        gate, up = gate_up_T2F.float().chunk(2, dim=-1)
        grad = grad_TF.float()
        if kind == "silu":
            share = gate.sigmoid()
            activated = gate * share
            slope = torch.addcmul(share, activated, 1 - share)
            grad_gate = slope.mul_(grad).mul_(up)
        else:
            approximate = "none" if kind == "gelu" else "tanh"
            activated = torch.nn.functional.gelu(gate, approximate=approximate)
            grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
        out = torch.empty_like(gate_up_T2F)
        halves = out.chunk(2, dim=-1)
        halves[0].copy_(grad_gate)
        torch.mul(activated, grad, out=grad_gate)
        halves[1].copy_(grad_gate)
        if remakes:
            grad_TF.copy_(activated.mul_(up))
        return out

    def rotate(
        self, x_TNH: Tensor, angles: Angles, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        cos_TA, sin_TA = angles
        turned_TNH = plain_rotary.rotate(x_TNH, cos_TA, -sin_TA if inverse else sin_TA)
        return turned_TNH if out is None else out.copy_(turned_TNH)


class HostOps(PlainOps):
    """Passes in C++ (each op's cpu.cpp), where they could be built: one pass over memory each."""

    def norm(self, x_TD: Tensor, gain: Gain, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        if not is_loaded():
            return super().norm(x_TD, gain, residual_TD)
        result = host_norm.rms_norm(x_TD, gain.weight_D, gain.eps, gain.offset, residual_TD)
        return (result, x_TD) if isinstance(result, Tensor) else result

    def norm_backward(
        self, hidden_TD: Tensor, gain: Gain, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not is_loaded():
            return super().norm_backward(hidden_TD, gain, grad_TD, grad_hidden_TD)
        return host_norm.rms_norm_backward(
            hidden_TD, gain.weight_D, grad_TD, gain.eps, gain.offset, grad_hidden_TD
        )

    def activation(self, gate_up_T2F: Tensor, kind: Activation) -> Tensor:
        if not is_loaded():
            return super().activation(gate_up_T2F, kind)
        return host_activation.gated_activation(gate_up_T2F, kind)

    def activation_backward(
        self, gate_up_T2F: Tensor, grad_TF: Tensor, kind: Activation, remakes: bool = False
    ) -> Tensor:
        if kind != "silu" or not is_loaded():
            return super().activation_backward(gate_up_T2F, grad_TF, kind, remakes)
        return host_activation.silu_backward(gate_up_T2F, grad_TF, remakes)

    def rotate(
        self, x_TNH: Tensor, angles: Angles, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        if not is_loaded():
            return super().rotate(x_TNH, angles, inverse, out)
        return host_rotary.rotate(x_TNH, *angles, inverse, out)


class KernelOps:
    """Launched without torch's dispatcher, which costs as much as a launch."""

    def norm(self, x_TD: Tensor, gain: Gain, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        from ridgeline.kernels.rms_norm import triton

        result: Any = triton.rms_norm(x_TD, gain.weight_D, gain.eps, gain.offset, residual_TD)
        if isinstance(result, Tensor):
            return result, x_TD
        normed_TD, hidden_TD = result
        return normed_TD, hidden_TD

    def norm_backward(
        self, hidden_TD: Tensor, gain: Gain, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from ridgeline.kernels.rms_norm import triton

        return triton.rms_norm_backward(
            hidden_TD, gain.weight_D, grad_TD, gain.eps, gain.offset, grad_hidden_TD
        )

    def activation(self, gate_up_T2F: Tensor, kind: Activation) -> Tensor:
        from ridgeline.kernels.gated_activation import triton

        result = triton.gated_activation(gate_up_T2F, kind)
        assert isinstance(result, Tensor)
        return result

    def activation_backward(
        self, gate_up_T2F: Tensor, grad_TF: Tensor, kind: Activation, remakes: bool = False
    ) -> Tensor:
        from ridgeline.kernels.gated_activation import triton

        return triton.gated_activation_backward(gate_up_T2F, grad_TF, kind, remakes)

    def rotate(
        self, x_TNH: Tensor, angles: Angles, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        from ridgeline.kernels.rotary import triton

        return triton.rotate(x_TNH, *angles, inverse, out)


class CompiledOps:
    """The plain norms and activations as torch.compile makes them, each when it is first used.
    Heads are turned in place, in views that torch.compile (2.13) does not take: as without it.
    """

    def __init__(self, others: TrainingOps) -> None:
        plain = PlainOps()
        self.norm = torch.compile(plain.norm)
        self.norm_backward = torch.compile(plain.norm_backward)
        self.activation = torch.compile(plain.activation)
        self.activation_backward = torch.compile(plain.activation_backward)
        self.rotate = others.rotate


PLAIN: TrainingOps = PlainOps()
HOST: TrainingOps = HostOps()
KERNELS: TrainingOps = KernelOps()


def check_compiles(device: str) -> None:
    """That torch.compile works here: it needs a C++ compiler, for a GPU also Triton."""
    try:
        torch.compile(lambda x: 2 * x + 1)(torch.zeros(64, device=device))
    except (RuntimeError, ImportError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"torch.compile does not work here ({reason[:200]}); leave --compile out"
        ) from error


def ops_for(device: torch.device, compiled: bool = False) -> TrainingOps:
    usual = HOST if device.type == "cpu" else KERNELS
    return CompiledOps(usual) if compiled else usual
