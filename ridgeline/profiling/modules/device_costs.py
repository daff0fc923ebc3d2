"""What the changes cost and save that no roofline of a single op tells: padding to sizes that 8
divides, the memory format of convolutions, kernels chosen by timing, copies of inputs, branches
beside each other.

Each is worked out from bytes, sizes and ceilings as far as those go. What is left is a share that
nobody measured here, and its line says that it is a guess: predictions that hang on one have wider
intervals (ModuleChange.is_guess).

    padded_s(seconds, limit_s, piece, work, form)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.profiling.modules.alignment import OddLayer
from ridgeline.profiling.modules.call_work import CallWork, OpPiece
from ridgeline.profiling.modules.convolutions import carried_bytes, work_share
from ridgeline.profiling.modules.form import ModuleForm

HALF = ("bf16", "fp16")
KERNEL_S = 2e-6  # no kernel is shorter on a GPU
# Of the way from what an op takes to what the roofline allows it, that is gone when its kernel was
# chosen by timing several. Guesses; an op that is at its limit gains nothing.
TIMED = 0.2  # by cuDNN, for a convolution
AUTOTUNED = 0.2  # by torch.compile, for a product
# Times as long as a 16-bit product of even sizes: rows that do not begin at multiples of 16 bytes
# are read by narrower loads. A guess; where the product was measured so, its limit bounds it.
UNALIGNED = 1.6
STREAM_STEP_S = 8e-6  # of the host, for each op that is sent to a stream by its plan; a guess
# B/s from the host's memory, where they were not measured. Guesses.
PAGEABLE = 10e9  # in one copy that the host waits for
STAGING = 12e9  # into pinned memory, by the host
PINNED = 25e9  # and from there, by the device itself


def nearer_s(seconds: float, limit_s: float, share: float) -> float:
    """A share of the way to the limit is gone."""
    return seconds - share * max(seconds - limit_s, 0.0)


def activation_bytes(piece: OpPiece, form: ModuleForm) -> float:
    is_halved = piece.dtype == "fp32" and (form.dtype or form.autocast) is not None
    return (0.5 if is_halved else 1.0) * (piece.num_bytes - piece.weight_bytes)


def channels_last_s(
    seconds: float, limit_s: float, num_bytes: float, bandwidth: float | None
) -> float:
    """Of a convolution. Fast kernels (tensor cores, oneDNN's) take channels last, or blocks of
    them: other layouts are read and written once more on both sides.
    """
    if bandwidth is None:
        return seconds
    return max(min(seconds, limit_s), seconds - 2 * num_bytes / bandwidth)


def winograd_s(seconds: float, piece: OpPiece, work: CallWork, form: ModuleForm) -> float:
    """Of a convolution of 3 × 3 by Winograd's products: at the same rate, and with what is written
    and read to carry its inputs and outputs there and back.
    """
    memory = work.hardware.ceiling("read_bandwidth")
    carrying_s = 0.0
    if memory is not None:
        carrying_s = carried_bytes(activation_bytes(piece, form)) / memory.value
    return work_share(*work.squares[piece.path]) * seconds + carrying_s


def padded_s(
    seconds: float, limit_s: float, piece: OpPiece, work: CallWork, form: ModuleForm
) -> float:
    """Of a product, with what the odd sizes of its layer do to it, or the padding of them. fp32 and
    a CPU take any sizes.
    """
    layer = work.odd.get(piece.path)
    if layer is None or not work.on_gpu or piece.kind != "matrix":
        return seconds
    was_half = piece.dtype in HALF
    if not was_half and (form.dtype or form.autocast) is None:
        return seconds
    if not form.pad:
        return seconds if was_half else UNALIGNED * seconds
    even_s = max(min(seconds, limit_s), seconds / UNALIGNED) if was_half else seconds
    growth = math.prod(layer.padded) / math.prod(layer.sizes)
    return growth * even_s + _padding_s(layer, piece, work, form)


def _padding_s(layer: OddLayer, piece: OpPiece, work: CallWork, form: ModuleForm) -> float:
    """Of inputs written once more with zeros. A compiler does it in the kernel before; outputs are
    cut by a view.
    """
    bandwidth = work.hardware.ceiling("read_bandwidth")
    num_in, num_out = layer.sizes
    if num_in == layer.padded[0] or form.compile is not None or bandwidth is None:
        return 0.0
    num_bytes = activation_bytes(piece, form) * num_in / (num_in + num_out)
    return KERNEL_S + 2 * num_bytes / bandwidth.value


def overlapped(parts: Sequence[tuple[float, float]], critical_share: float) -> float:
    """Of the time one after the other, with branches beside each other: no less than the longest
    path, nor than what all work takes at the roofline. `parts` are seconds of ops and their limits;
    an op without one is taken to fill the device.
    """
    total_s = sum(seconds for seconds, _ in parts)
    filled_s = sum(min(seconds, limit_s) if limit_s > 0 else seconds for seconds, limit_s in parts)
    return max(critical_share, filled_s / total_s) if total_s > 0 else 1.0


class InputCopies(NamedTuple):
    """Of the inputs that a call brings from the host's memory."""

    host_s: float  # that the host is busy with them
    waiting_s: float  # in which the call waits for them


def input_copies(work: CallWork, form: ModuleForm, busy_s: float) -> InputCopies:
    """Plain copies are waited for. By pinned memory the host copies once and goes on: with calls
    behind each other the device's copy runs beside the call before (`busy_s`), alone it is waited
    for too.
    """
    num_bytes = work.host_input_bytes
    if num_bytes == 0:
        return InputCopies(0.0, 0.0)
    if form.inputs != "pinned":
        return InputCopies(0.0, num_bytes / _rate(work, "h2d_pageable", PAGEABLE))
    staging_s, device_s = num_bytes / STAGING, num_bytes / _rate(work, "h2d_pinned", PINNED)
    if work.is_queued:
        return InputCopies(staging_s, max(0.0, device_s - busy_s))
    return InputCopies(0.0, staging_s + device_s)


def _rate(work: CallWork, key: str, usual: float) -> float:
    known = work.hardware.ceiling(key)
    return usual if known is None else known.value
