"""One call of a module as it was measured, and its ops as pieces that predictions scale.

work = CallWork(ops, call_s, host_s, num_kernels, hardware, grad=True)
pieces = [piece_of(traced) for traced in work.ops]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.hardware import Hardware
from ridgeline.profiling.modules.alignment import OddLayer
from ridgeline.profiling.modules.tracing import TracedOp


@dataclass(frozen=True)
class CallWork:
    ops: tuple[TracedOp, ...]  # with untraced seconds
    call_s: float
    host_s: float  # in which no op ran: gaps and host
    num_kernels: int
    hardware: Hardware
    grad: bool  # autograd watched
    linears: frozenset[str] = frozenset()  # paths of nn.Linear: whose weights may become codes
    odd: Mapping[str, OddLayer] = field(default_factory=dict)  # paths of layers 8 does not divide
    # Channels in and out of convolutions that Winograd's products can replace, by path.
    squares: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    host_input_bytes: int = 0  # of inputs that every call brings to the device, beside `call_s`
    is_queued: bool = False  # calls follow each other without waiting for results
    # Of the ops' time, on the longest path through branches that could run at once; 1: a chain.
    critical_share: float = 1.0

    @property
    def on_gpu(self) -> bool:
        return self.hardware.device_type != "cpu"


class OpPiece(NamedTuple):
    """An op, or several that became one."""

    kind: str
    name: str
    path: str
    seconds: float
    num_bytes: float
    weight_bytes: float
    flops: float
    dtype: str
    num_kernels: int


def piece_of(traced: TracedOp) -> OpPiece:
    op = traced.op
    return OpPiece(
        kind=op.kind,
        name=op.name,
        path=op.path,
        seconds=traced.seconds,
        num_bytes=float(op.num_bytes),
        weight_bytes=float(op.weight_bytes),
        flops=op.flops,
        dtype=op.dtype,
        num_kernels=max(traced.num_kernels, 1),
    )
