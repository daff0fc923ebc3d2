"""Calls the kernels of few_rows.cuh: products of 1 to 64 rows with plain or quantized weights.

`few_rows` is the launcher of both skinny_linear's cuda.cu and quantized_linear's; cuda_space.py
says how the work can be cut.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_void_p

import torch
from torch import Tensor

from ridgeline.errors import HardwareError, UnsupportedError
from ridgeline.kernels.extension import library, pointer, stream_of
from ridgeline.kernels.launch import is_only_compiling, target_of
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cuda_space import (
    GROUPS,
    KINDS,
    PIECE,
    Groups,
    OneRow,
    WeightKind,
    WorkSplit,
    default_cuda_config,
    fits_few,
    fits_one_row,
)
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.kernels.skinny_linear.tune_space import MAX_ROWS
from ridgeline.kernels.targets import Target, can_wait

SCALE_KINDS = ("none", "tensor", "row", "group")
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh")


class SkinnyArguments(ctypes.Structure):
    """few_rows.cuh's RidgelineJob."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "scale", "zero", "x_scale")),
        *((name, c_void_p) for name in ("bias", "residual", "gain", "out")),
        *((name, c_longlong) for name in ("x_stride", "weight_stride", "residual_stride")),
        *((name, c_int) for name in ("rows", "outputs", "depth", "group_shift")),
        *((name, c_int) for name in ("gated", "activation", "scale_kind", "x_scale_kind")),
        ("out_half", c_int),
        ("eps", c_float),
        ("offset", c_float),
    ]


def skinny_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts = NOTHING_FUSED,
    out_MO: Tensor | None = None,
    config: WorkSplit | OneRow | None = None,
    pdl: bool = True,
    defines: tuple[str, ...] = (),
) -> Tensor:
    """The launcher for plain weights."""
    if weight_OD.dtype != x_MD.dtype or x_MD.element_size() != 2:
        raise UnsupportedError(
            f"x is {x_MD.dtype}, the weight {weight_OD.dtype}; both must be bf16, or both fp16"
        )
    return few_rows(
        "plain", x_MD, weight_OD, fused, x_MD.dtype,
        config=config, pdl=pdl, defines=defines, out=out_MO,
    )  # fmt: skip


def few_rows(
    kind: WeightKind,
    x_MD: Tensor,
    weight: Tensor,
    fused: FusedParts,
    out_dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    x_scale: Tensor | None = None,
    config: WorkSplit | OneRow | None = None,
    pdl: bool = True,
    defines: tuple[str, ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """The product; raises UnsupportedError for what the kernels do not do."""
    x_rows = as_rows(x_MD)
    check(kind, x_rows, weight, fused, out_dtype, scale)
    num_rows, depth = x_rows.shape
    gated = fused.gated
    num_outputs = weight.shape[0] // (2 if gated else 1)
    target = target_of(x_MD)
    config = config or default_cuda_config(kind, num_rows, num_outputs, depth, gated)
    if not isinstance(config, OneRow):
        check_split(kind, config, x_rows, fused)
    else:
        check_one_row(kind, x_rows, x_scale)
        if kind == "int4" and scale is not None:
            groups = Groups(depth // scale.shape[0], zero is not None)
            if not groups.fits(
                config,
                num_outputs=num_outputs,
                depth=depth,
                gated=gated,
                num_units=target.num_units,
            ):
                raise UnsupportedError(f"{config.label} has no room for {num_outputs} scales")
    op = "skinny_linear" if kind == "plain" else "quantized_linear"
    functions = library(op, defines)
    if functions is None:
        raise UnsupportedError(f"{op} is not built in CUDA C++; run `ridgeline kernels build`")
    if out is None:
        out = torch.empty((*x_MD.shape[:-1], num_outputs), dtype=out_dtype, device=x_MD.device)
    assert out.is_contiguous(), "the result must be contiguous"
    assert out.dtype == out_dtype, f"the result is {out_dtype}, the tensor given for it {out.dtype}"
    if not num_rows or is_only_compiling():
        return out
    residual = None if fused.residual_MO is None else as_rows(fused.residual_MO)
    arguments = SkinnyArguments(
        x=pointer(x_rows),
        weight=pointer(weight),
        scale=pointer(scale),
        zero=pointer(zero),
        x_scale=pointer(x_scale),
        bias=pointer(fused.bias_O),
        residual=pointer(residual),
        gain=pointer(fused.norm_weight_D),
        out=pointer(out),
        x_stride=x_rows.stride(0),
        weight_stride=weight.stride(0) * weight.element_size(),
        residual_stride=0 if residual is None else residual.stride(0),
        rows=num_rows,
        outputs=num_outputs,
        depth=depth,
        group_shift=group_shift(kind, depth, scale),
        gated=gated,
        activation=ACTIVATIONS.index(fused.activation),
        scale_kind=SCALE_KINDS.index(scale_kind(scale)),
        x_scale_kind=SCALE_KINDS.index(scale_kind(x_scale)),
        out_half=out_dtype == torch.float16,
        eps=fused.eps,
        offset=fused.offset,
    )
    error = start(functions, kind, arguments, config, target, x_MD, pdl)
    if error:
        raise HardwareError(
            f"the CUDA kernel for {kind} weights could not be started for {num_rows} x "
            f"{num_outputs} x {depth} as {config.label}: error {error}"
        )
    return out


def start(
    functions: ctypes.CDLL,
    kind: WeightKind,
    arguments: SkinnyArguments,
    config: WorkSplit | OneRow,
    target: Target,
    x_MD: Tensor,
    pdl: bool,
) -> int:
    """CUDA's error code, 0 for none."""
    job, number, half = ctypes.byref(arguments), KINDS.index(kind), x_MD.dtype == torch.float16
    blocks = config.blocks * target.num_units
    waits = pdl and can_wait(target)
    stream = c_void_p(stream_of(x_MD.device))
    error: int
    if isinstance(config, OneRow):
        error = functions.ridgeline_one_row(
            job, number, half, config.lines, config.warps, config.stages, blocks, waits, stream
        )
    else:
        error = functions.ridgeline_few_rows(
            job, number, half, config.tiles, config.warps, config.stages, config.splits,
            config.teams, blocks, waits, stream,
        )  # fmt: skip
    return error


def group_shift(kind: WeightKind, depth: int, scale: Tensor | None) -> int:
    """Groups of 4-bit codes have 2^shift of them."""
    if kind != "int4" or scale is None:
        return 0
    return (depth // scale.shape[0]).bit_length() - 1


def check_one_row(kind: WeightKind, x_rows: Tensor, x_scale: Tensor | None) -> None:
    num_rows, depth = x_rows.shape
    if not fits_one_row(kind, num_rows, depth):
        raise UnsupportedError(
            f"{num_rows} x {depth} with {kind} weights does not fit the kernel for one row"
        )
    if x_scale is not None:
        raise UnsupportedError("the kernel for one row takes 16-bit x without a scale")


def check_split(kind: WeightKind, config: WorkSplit, x_rows: Tensor, fused: FusedParts) -> None:
    num_rows, depth = x_rows.shape
    if kind == "fp8 weights":
        raise UnsupportedError(
            f"{num_rows} rows of 16-bit x times fp8 weights; only one row is supported"
        )
    if fused.norm_weight_D is not None and config.splits:
        raise UnsupportedError(
            f"the norm of {num_rows} rows of {depth} cannot be fused with splits of the depth"
        )


def check(
    kind: WeightKind,
    x_rows: Tensor,
    weight: Tensor,
    fused: FusedParts,
    out_dtype: torch.dtype,
    scale: Tensor | None,
) -> None:
    num_rows, depth = x_rows.shape
    if num_rows > MAX_ROWS:
        raise UnsupportedError(f"{num_rows} rows are more than {MAX_ROWS}")
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"results in {out_dtype}; only bf16 and fp16 are supported")
    if x_rows.element_size() == 2 and x_rows.dtype != out_dtype:
        raise UnsupportedError(
            f"x is {x_rows.dtype}, the result {out_dtype}; they must have the same dtype"
        )
    if depth % PIECE.get(kind, 16):
        raise UnsupportedError(f"rows of {depth} weights are not a multiple of 16 bytes")
    if kind == "fp8" and scale_kind(scale) == "group" and not fits_few(kind, num_rows, depth):
        raise UnsupportedError(f"block scales are not supported for {num_rows} rows of {depth}")
    if kind == "int4" and scale is not None and depth // scale.shape[0] not in GROUPS:
        raise UnsupportedError(
            f"groups of {depth // scale.shape[0]} are not supported; use 32, 64 or 128"
        )
    num_outputs = weight.shape[0] // (2 if fused.activation else 1)
    if num_outputs < 32:
        raise UnsupportedError(f"{num_outputs} outputs are fewer than 32")
    if kind == "int4" and num_outputs % 16:
        raise UnsupportedError(f"{weight.shape[0]} outputs of int4 are not a multiple of 16")
    for tensor in (x_rows, weight, fused.norm_weight_D):
        if tensor is not None and not aligned(tensor):
            raise UnsupportedError(
                "x, the weight and the norm's weight must be aligned to 16 bytes"
            )
    if weight.stride(0) * weight.element_size() >= 1 << 31:
        raise UnsupportedError("the weight's row stride is 2 GiB or more")
    alone = fits_one_row(kind, num_rows, depth)
    if not alone and not fits_few(kind, num_rows, depth) and not can_wait(target_of(x_rows)):
        raise UnsupportedError(f"{num_rows} rows need thread block clusters: Hopper or later")
    same = [fused.bias_O, fused.residual_MO, fused.norm_weight_D, scale if kind == "int4" else None]
    if any(tensor is not None and tensor.dtype != out_dtype for tensor in same):
        raise UnsupportedError("bias, residual, norm and group scales must have the result's dtype")


def aligned(tensor: Tensor) -> bool:
    """Rows begin at multiples of 16 bytes."""
    stride = tensor.stride(0) * tensor.element_size() if tensor.dim() > 1 else 0
    return tensor.data_ptr() % 16 == 0 and stride % 16 == 0


def scale_kind(scale: Tensor | None) -> str:
    if scale is None:
        return "none"
    assert scale.is_contiguous(), "scales are contiguous"
    if scale.dim() == 2:
        return "group"
    return "tensor" if scale.numel() == 1 else "row"
