"""What a change to how a module runs would give: the owner of predictions for modules outside our
families, as predicting/gains.py is for recipes.

A call is taken apart into its ops, as they were measured. A change scales an op's time by what the
roofline says of it after and before; ops that a compiler fuses move their largest operands only;
the host's part shrinks with the number of launches, and goes with a graph. On a GPU host and device
work at the same time, on a CPU one after the other. What padding, layouts, copies of inputs and
branches do beside that is in device_costs.py.

    predict(work, ModuleForm(), ModuleForm(dtype="bf16"), CHANGES["bf16"]).speedup
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.hardware.units import human
from ridgeline.profiling.modules.call_work import CallWork, OpPiece, piece_of
from ridgeline.profiling.modules.changes import CHANGES, ModuleChange, Suggestion
from ridgeline.profiling.modules.device_costs import (
    AUTOTUNED,
    KERNEL_S,
    STREAM_STEP_S,
    TIMED,
    activation_bytes,
    channels_last_s,
    input_copies,
    nearer_s,
    overlapped,
    padded_s,
    winograd_s,
)
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.tracing import TracedOp
from ridgeline.profiling.predicting.accuracy import interval_factor
from ridgeline.profiling.predicting.gains import (
    GUESSED_ERROR,
    LEAST_ERROR,
    USUAL_ERROR,
    with_interval,
)
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.predicting.reach import attention_reach, product_reach
from ridgeline.profiling.roofline import roof_of
from ridgeline.quantization.scheme import parse_scheme

GPU_ONLY = ("tf32", "graphs", "fp16", "autocast-fp16", "cudnn-benchmark", "pad")
UNCOUNTED = ("pinned-inputs", "streams")  # ops alone do not tell whether they apply
WORTH = 1.03  # a change predicted to give less is not suggested
FUSIBLE = ("pointwise", "reduction", "copy")
CPU_CALL_S = 4e-6  # an op of torch on a CPU, without work (Xeon, 2026-11-15)
OP_HOST_S = 8e-6  # an eager op on the host of a GPU (H200's host, 2026-11-15: 6 to 10 µs)
# No record stands behind these four: guesses.
GRADLESS = 0.85  # of the host's time, without autograd's bookkeeping
COMPILED_S = 40e-6  # of a compiled call: guards and wrappers
REPLAY_S = 10e-6  # of launching a graph, and copies of inputs and outputs around it
CASTING = 1.3  # of the host's time under autocast
# From here on torch multiplies bf16 on a CPU by its matrix tiles; a single row it does slower than
# in fp32 (Xeon with AMX, 2026-11-15: BERT-base with 8 rows 2.4 times as fast).
TILED_ROWS = 4
FEW_ROWS = {"cpu": 32, "cuda": 64}  # with more, codes go back to the model's dtype first


class CallParts(NamedTuple):
    """Seconds of a call."""

    matrices: float
    attention: float
    other: float
    host: float
    inputs: float  # waiting for them to come from the host's memory

    @property
    def busy(self) -> float:
        return self.matrices + self.attention + self.other


def predict(
    work: CallWork, before: ModuleForm, after: ModuleForm, change: ModuleChange
) -> Prediction:
    """How many times faster `after` is to be than `before`."""
    old, new = modelled(work, before), modelled(work, after)
    speedup = _total(work, old) / max(_total(work, new), 1e-9)
    width = _width(speedup, change, work.hardware.name)
    return with_interval(speedup, width, _why(work, old, new))


def predict_together(
    work: CallWork, after: ModuleForm, changes: Sequence[ModuleChange]
) -> Prediction:
    """How many times faster all changes at once are to be than the module as it was given."""
    old, new = modelled(work, ModuleForm()), modelled(work, after)
    speedup = _total(work, old) / max(_total(work, new), 1e-9)
    widths = [_width(speedup, change, work.hardware.name) for change in changes]
    return with_interval(speedup, max(widths, default=LEAST_ERROR), _why(work, old, new))


def _width(speedup: float, change: ModuleChange, device: str) -> float:
    """Of the interval, as a logarithm: from earlier predictions where there are enough of them."""
    known = interval_factor(accuracy_area(change.area), device)
    if known.num_outcomes:
        return math.log(known.factor)
    least = GUESSED_ERROR if change.is_guess else LEAST_ERROR
    return least + USUAL_ERROR * abs(math.log(max(speedup, 1e-9)))


def accuracy_area(area: str) -> str:
    """Under which the errors of these predictions are kept: recipes have areas of their own."""
    return f"{area} of modules"


def suggestions(work: CallWork) -> tuple[Suggestion, ...]:
    """Changes that are predicted to be worth a try, each on its own, the largest gain first."""
    result = []
    for change in CHANGES.values():
        if _fits(work, change):
            prediction = predict(work, ModuleForm(), change.of(ModuleForm()), change)
            if prediction.speedup >= WORTH:
                result.append(Suggestion(change.title, change.how, prediction))
    return tuple(sorted(result, key=lambda each: -each.prediction.speedup))


def _fits(work: CallWork, change: ModuleChange) -> bool:
    """Whether it can change anything here, as far as the ops tell."""
    ops = [traced.op for traced in work.ops]
    trains = any(op.phase == "backward" for op in ops)
    if trains and change.name not in ("compile", "tf32", "autocast-bf16", "sdpa"):
        return False
    if change.name in GPU_ONLY and not work.on_gpu:
        return False
    if change.area == "tensor cores" and not any(
        op.dtype == "fp32" and op.kind in ("matrix", "attention") for op in ops
    ):
        return False
    if change.name == "inference":
        return work.grad
    if change.name in ("channels-last", "cudnn-benchmark"):
        return any("conv" in op.name for op in ops)
    if change.name == "pad":
        return bool(work.odd)
    if change.name == "winograd":
        return bool(work.squares) and not work.on_gpu
    return change.name not in UNCOUNTED


def modelled(work: CallWork, form: ModuleForm) -> CallParts:
    pieces = [piece_of(traced) for traced in work.ops if traced.seconds > 0]
    num_before = len(pieces)
    if form.attention == "sdpa":
        pieces = with_sdpa(pieces, work)
    if form.compile is not None:
        pieces = fused(pieces)
    seconds = [_seconds(piece, work, form) for piece in pieces]
    share = 1.0
    if form.streams:
        limits = [_limit(piece, work, form) for piece in pieces]
        share = overlapped(list(zip(seconds, limits, strict=True)), work.critical_share)
    parts = {"matrix": 0.0, "attention": 0.0, "other": 0.0}
    for piece, piece_s in zip(pieces, seconds, strict=True):
        parts[piece.kind if piece.kind in parts else "other"] += share * piece_s
    copies = input_copies(work, form, sum(parts.values()))
    host_s = _host_s(work, form, len(pieces) / max(num_before, 1)) + copies.host_s
    return CallParts(
        matrices=parts["matrix"],
        attention=parts["attention"],
        other=parts["other"],
        host=host_s,
        inputs=copies.waiting_s,
    )


def _total(work: CallWork, parts: CallParts) -> float:
    both_s = max(parts.busy, parts.host) if work.on_gpu else parts.busy + parts.host
    return parts.inputs + both_s


def fused(pieces: Sequence[OpPiece]) -> list[OpPiece]:
    """Neighbours that a compiler makes one kernel of: it moves what the largest of them moved. What
    moves nothing, such as a view, goes.
    """
    result: list[OpPiece] = []
    for piece in pieces:
        if piece.num_bytes == 0 and piece.flops == 0:
            continue
        last = result[-1] if result else None
        if last is None or not {last.kind, piece.kind} <= set(FUSIBLE):
            result.append(piece)
            continue
        most = max(last.num_bytes, piece.num_bytes)
        share = most / max(last.num_bytes + piece.num_bytes, 1.0)
        seconds = (last.seconds + piece.seconds) * share
        result[-1] = last._replace(seconds=seconds, num_bytes=most)
    return result


def with_sdpa(pieces: Sequence[OpPiece], work: CallWork) -> list[OpPiece]:
    """Attention that writes its scores, product by product, as one op that does not."""
    result: list[OpPiece] = []
    at = 0
    while at < len(pieces):
        end = _attention_end(pieces, at)
        if end is None:
            result.append(pieces[at])
            at += 1
        else:
            result.append(_attention(pieces[at : end + 1], work))
            at = end + 1
    return result


def has_plain_attention(work: CallWork) -> bool:
    pieces = [piece_of(traced) for traced in work.ops]
    return any(_attention_end(pieces, at) is not None for at in range(len(pieces)))


def _attention_end(pieces: Sequence[OpPiece], start: int) -> int | None:
    """The second product of scores that the product at `start` makes."""
    if not pieces[start].name.endswith(("bmm", "baddbmm")):
        return None
    has_softmax = False
    for at in range(start + 1, min(start + 24, len(pieces))):
        has_softmax = has_softmax or "softmax" in pieces[at].name
        if pieces[at].kind == "matrix":
            return at if has_softmax and pieces[at].name.endswith("bmm") else None
    return None


def _attention(pieces: Sequence[OpPiece], work: CallWork) -> OpPiece:
    scores = max(piece.num_bytes for piece in pieces if "softmax" in piece.name) / 2
    first, last = pieces[0], pieces[-1]
    num_bytes = max(first.num_bytes + last.num_bytes - 2 * scores, 1.0)
    flops = first.flops + last.flops
    seconds = sum(piece.seconds for piece in pieces)
    piece = OpPiece("attention", "sdpa", first.path, seconds, num_bytes, 0.0, flops, first.dtype, 1)
    return piece._replace(seconds=min(seconds, _limit(piece, work, ModuleForm())))


def _seconds(piece: OpPiece, work: CallWork, form: ModuleForm) -> float:
    fixed = min(piece.seconds, piece.num_kernels * (KERNEL_S if work.on_gpu else CPU_CALL_S))
    before, after = _limit(piece, work, ModuleForm()), _limit(piece, work, form)
    if before <= 0:
        return piece.seconds
    seconds = fixed + (piece.seconds - fixed) * after / before
    if "conv" in piece.name:
        if form.layout == "channels_last":
            memory = work.hardware.ceiling("read_bandwidth")
            rate = None if memory is None else memory.value
            seconds = channels_last_s(seconds, after, activation_bytes(piece, form), rate)
        if form.winograd and piece.path in work.squares:
            seconds = winograd_s(seconds, piece, work, form)
        if form.cudnn_benchmark:
            seconds = nearer_s(seconds, after, TIMED)
    if form.compile == "max-autotune-no-cudagraphs" and piece.kind == "matrix":
        seconds = nearer_s(seconds, after, AUTOTUNED)
    return padded_s(seconds, after, piece, work, form)


def _limit(piece: OpPiece, work: CallWork, form: ModuleForm) -> float:
    """What its bytes and FLOPs take at the shares of the ceilings that kernels usually reach."""
    dtype = (form.computes_in or piece.dtype) if piece.dtype == "fp32" else piece.dtype
    roof = roof_of(work.hardware, dtype if dtype in RATES else "fp32")
    if roof is None or not piece.dtype:
        return 0.0
    has_codes = form.scheme is not None and piece.path in work.linears
    num_bytes = _bytes(piece, form, work.on_gpu, has_codes)
    if piece.kind == "attention":
        reach = attention_reach(on_gpu=work.on_gpu, fused=True)
    elif piece.kind == "matrix":
        scheme = form.scheme if has_codes else None
        plain = "fp32" if dtype in ("fp32", "tf32") else dtype
        tiled = scheme is not None or num_rows(piece) >= TILED_ROWS
        reach = product_reach(scheme, plain, on_gpu=work.on_gpu, fused=tiled)
    else:
        return num_bytes / roof.memory.value
    memory_s = num_bytes / (reach.bandwidth * roof.memory.value)
    return max(memory_s, piece.flops / (reach.matrix * roof.matrix.value))


RATES = ("fp32", "tf32", "bf16", "fp16", "int8")


def _bytes(piece: OpPiece, form: ModuleForm, on_gpu: bool, has_codes: bool) -> float:
    """Under a form, of what moves `num_bytes` as it is."""
    weights, others, size = piece.weight_bytes, piece.num_bytes - piece.weight_bytes, 1.0
    if piece.dtype == "fp32" and form.dtype is not None:
        size = 0.5
    elif piece.dtype == "fp32" and form.autocast is not None and piece.kind == "matrix":
        return 0.5 * others + 2.0 * weights  # read whole, written and read again in half
    if not has_codes or form.scheme is None or piece.kind != "matrix":
        return size * piece.num_bytes
    plain = dtype_bytes(parse_dtype(piece.dtype))
    codes = weights * parse_scheme(form.scheme).bits / (8 * plain)
    if num_rows(piece) > FEW_ROWS["cuda" if on_gpu else "cpu"]:
        codes += 2 * size * weights
    return size * others + codes


def num_rows(piece: OpPiece) -> float:
    """That a product multiplies its weight with."""
    if not piece.weight_bytes:
        return 0.0
    return piece.flops * dtype_bytes(parse_dtype(piece.dtype)) / (2 * piece.weight_bytes)


def _host_s(work: CallWork, form: ModuleForm, share_of_ops: float) -> float:
    """Of the host's work for one call: what it takes on a GPU, and what is beside ops on a CPU."""
    host_s = work.host_s
    if work.on_gpu:
        idle = work.host_s > 0.1 * work.call_s  # then it is the host that paces the call
        host_s = work.call_s if idle else min(work.call_s, len(work.ops) * OP_HOST_S)
    if form.graphs:
        step = work.hardware.ceiling("graph_step")
        kernels = max(work.num_kernels, 1) * share_of_ops
        return REPLAY_S + kernels * (step.value if step is not None else KERNEL_S / 2)
    if work.grad and not form.grad:
        host_s *= GRADLESS
    if form.autocast is not None:
        host_s *= CASTING
    if form.streams:
        host_s += len(work.ops) * STREAM_STEP_S
    if form.compile is not None:
        host_s = min(host_s, host_s * share_of_ops + COMPILED_S)
    return host_s


def _why(work: CallWork, old: CallParts, new: CallParts) -> str:
    """The part that changes most."""
    names = {"matrices": "products", "other": "other ops"}
    most = max(CallParts._fields, key=lambda name: abs(getattr(new, name) - getattr(old, name)))
    before, after = getattr(old, most), getattr(new, most)
    if math.isclose(before, after, rel_tol=1e-3):
        return "changes nothing that was counted here"
    return (
        f"{names.get(most, most)}: {human(before, 's')} become {human(after, 's')}, "
        f"of {human(work.call_s, 's')} as it was"
    )


def scaled(ops: Sequence[TracedOp], factor: float) -> tuple[TracedOp, ...]:
    """With traced seconds taken to untraced ones."""
    return tuple(replace(traced, seconds=traced.seconds * factor) for traced in ops)
