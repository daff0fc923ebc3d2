"""What the registry knows of products with quantized weights: their work, their shapes, what they
are timed against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.errors import UnsupportedError
from ridgeline.formats.packing import pack_int4, pack_int8
from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.inputs import input_bytes, label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.quantized_linear import cuda, launched, reference, scaled_mm
from ridgeline.kernels.quantized_linear.reference import BLOCK, Operands, default_out, packed_bits
from ridgeline.kernels.quantized_linear.tune_space import choice_key, search_space
from ridgeline.kernels.skinny_linear.cuda_space import (
    Groups,
    OneRow,
    WorkSplit,
    cuda_configs,
    fits_few,
)
from ridgeline.kernels.skinny_linear.cut import scale_kind
from ridgeline.kernels.skinny_linear.fused import FusedParts, split_fused
from ridgeline.kernels.skinny_linear.op import PROJECTIONS, make_fused
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig, default_config, shortlist
from ridgeline.kernels.skinny_linear.tune_space import search_space as plain_rows_space
from ridgeline.kernels.targets import Target

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
BASELINE_ONLY = ("weight_bf16", "x_bf16")  # what the unquantized baseline multiplies


@dataclass(frozen=True)
class QuantizedForm:
    """One form of weights and x; see reference.py."""

    name: str
    weight: torch.dtype | None = None  # None: 4-bit groups
    codes: bool = False  # x comes as codes too, of the weight's dtype
    scale: str = "row"  # tensor, row or block; of x and of 8-bit weights
    group: int = 128
    zeros: bool = False
    packed: bool = False  # int8 in words, as 4-bit weights always are


W8A16 = QuantizedForm("w8a16", INT8, packed=True)
W8A16_ROWS = QuantizedForm("w8a16 rows", INT8)
FP8A16 = QuantizedForm("fp8a16", FP8)
W4A16 = QuantizedForm("w4a16 g128")
W4A16_64 = QuantizedForm("w4a16 g64 zeros", group=64, zeros=True)
W4A16_32 = QuantizedForm("w4a16 g32 zeros", group=32, zeros=True)
W8A8 = QuantizedForm("w8a8 int8", INT8, codes=True)
FP8_TENSOR = QuantizedForm("w8a8 fp8 tensor", FP8, codes=True, scale="tensor")
FP8_ROW = QuantizedForm("w8a8 fp8 row", FP8, codes=True)
FP8_BLOCK = QuantizedForm("w8a8 fp8 block", FP8, codes=True, scale="block")


def launch(**inputs: Any) -> Tensor:
    given, fused, rest = split_operands(inputs)
    return launched(given, fused, **rest)


def launch_triton(config: SkinnyConfig | WorkSplit | OneRow | None = None, **inputs: Any) -> Tensor:
    from ridgeline.kernels.quantized_linear import triton

    given, fused, rest = split_operands(inputs)
    tiles = config if isinstance(config, SkinnyConfig) else None
    return triton.quantized_linear(given, fused, **rest, config=tiles)


def launch_cuda(
    config: SkinnyConfig | WorkSplit | OneRow | None = None,
    defines: tuple[str, ...] = (),
    **inputs: Any,
) -> Tensor:
    """The kernels in CUDA C++, which take no config of Triton's."""
    given, fused, rest = split_operands(inputs)
    split = None if isinstance(config, SkinnyConfig) else config
    return cuda.quantized_linear(given, fused, **rest, config=split, defines=defines)


def define(config: SkinnyConfig | WorkSplit | OneRow | None = None, **inputs: Any) -> Tensor:
    """The reference, whose result no config may change."""
    given, fused, rest = split_operands(inputs)
    return reference.quantized_linear(given, fused, **rest)


def cublas(x_MD: Tensor, weight_bf16: Tensor, x_bf16: Tensor, **_: Any) -> Tensor:
    """The product alone, of the same shape, unquantized."""
    return functional.linear(x_bf16, weight_bf16)


def torch_scaled_mm(
    x_MD: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None = None, **_: Any
) -> Tensor:
    """Only for fp8 with scales of the tensor or of the rows."""
    if x_scale is None or weight.dtype != FP8 or weight_scale.dim() == 2:
        raise UnsupportedError("torch._scaled_mm takes fp8 with scales of the tensor or the rows")
    return scaled_mm(x_MD, weight, weight_scale, x_scale)


def split_operands(inputs: OpInputs) -> tuple[Operands, FusedParts, OpInputs]:
    """A product's arguments by name, as its two sides, what is folded in, and the rest."""
    fused, rest = split_fused(_own(inputs))
    names = [name for name in Operands._fields if name in rest]
    return Operands(**{name: rest.pop(name) for name in names}), fused, rest


def _own(inputs: OpInputs) -> OpInputs:
    return {name: value for name, value in inputs.items() if name not in BASELINE_ONLY}


def cost(
    x_MD: Tensor, weight: Tensor, activation: Activation | None = None, **inputs: Any
) -> OpCost:
    """Packed bytes."""
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    outputs = weight.shape[0] // (2 if activation else 1)
    matrix = {INT8: "int8", FP8: "fp8"}.get(x_MD.dtype, "bf16")
    return OpCost(
        x_MD.nbytes + weight.nbytes + input_bytes(_own(inputs)),
        rows * outputs * default_out(x_MD).itemsize,
        2.0 * rows * weight.shape[0] * depth,
        matrix,
    )


def make(
    form: QuantizedForm,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    extras: str,
    activation: Activation | None,
    config: SkinnyConfig | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    num_rows, num_outputs, depth = shape
    weight_rows = num_outputs * (2 if activation else 1)
    x_MD = normal((num_rows, depth), dtype, device, generator)
    if "strided" in extras:
        x_MD = strided_rows(x_MD)
    inputs: OpInputs = {"x_MD": x_MD}
    inputs |= make_weight(form, weight_rows, depth, dtype, device, generator)
    if form.codes:
        assert form.weight is not None
        inputs["x_MD"], inputs["x_scale"] = make_codes(x_MD, form, (1, BLOCK))
        inputs["out_dtype"] = dtype
    inputs |= make_fused(shape, dtype, extras, activation, device, generator)
    if config is not None:
        inputs["config"] = config
    if "baseline" in extras:
        inputs["x_bf16"] = x_MD.to(BF16)
        inputs["weight_bf16"] = torch.randn(
            weight_rows, depth, dtype=BF16, device=device, generator=generator
        )
    return inputs


def make_weight(
    form: QuantizedForm,
    weight_rows: int,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    if form.weight is not None:
        weight = normal((weight_rows, depth), torch.float32, device, generator, depth**-0.5)
        codes, scale = make_codes(weight, form, (BLOCK, BLOCK))
        return {"weight": pack_int8(codes) if form.packed else codes, "weight_scale": scale}
    codes = torch.randint(0, 16, (weight_rows, depth), device=device, generator=generator)
    groups = (depth // form.group, weight_rows)
    scale = torch.rand(groups, device=device, generator=generator) + 0.5
    inputs = {"weight": pack_int4(codes), "weight_scale": (scale * depth**-0.5 / 4).to(dtype)}
    if form.zeros:
        zeros = torch.randint(0, 16, groups, device=device, generator=generator)
        inputs["zero_GO"] = zeros.to(torch.uint8)
    return inputs


def make_codes(x: Tensor, form: QuantizedForm, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """8-bit codes of a matrix, and scales of the kind the form has."""
    assert form.weight is not None
    if form.scale == "row":
        return quantize_rows(x, form.weight)
    if form.scale == "tensor":
        codes, scale = quantize_rows(x.reshape(1, -1), form.weight)
        return codes.view(x.shape), scale.reshape(())
    blocks = [-(-size // edge) for size, edge in zip(x.shape, block, strict=True)]
    scale = (
        0.01
        + x.float().abs().amax()
        * torch.linspace(0.5, 1.5, blocks[0] * blocks[1], device=x.device)
        / 448
    )
    scale = scale.view(blocks[0], blocks[1]).to(x.device)
    codes = (x.float() / reference.spread(scale, x.shape, block)).to(form.weight)
    return codes, scale.contiguous()


def case(
    form: QuantizedForm,
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    extras: str = "",
    activation: Activation | None = None,
    config: SkinnyConfig | None = None,
    name: str = "",
) -> Case:
    """`shape` is rows, outputs, depth; `extras` any of bias, norm, residual, strided, baseline."""
    shown = extras.replace("baseline", "").strip()
    # Scales of short groups, and of any with many rows, go onto the weights before the matrix
    # product, rounded to x's dtype.
    rounds_weights = form.weight is None and (form.group < 128 or shape[0] > 32)
    # Norms of more rows than fit beside the weights are a kernel of their own.
    rounds_norm = "norm" in extras and not fits_few("int4", shape[0], shape[2])
    return Case(
        label(form.name, name, shape, dtype, shown, activation, config and config.label),
        partial(make, form, shape, dtype, extras, activation, config),
        dtype,
        shape[2],
        roundings=1 + rounds_norm + (2 if activation else 1) * rounds_weights,
    )


def supports(target: Target, case: Case) -> bool:
    """fp8 codes here are e4m3fn: not on a chip without, nor on one whose fp8 is of another kind."""
    return "fp8" not in case.label or target.fp8 == FP8


REDUCE_8 = SkinnyConfig("reduce", 1, 4, 128, 1, 4, 2)
SPLIT_REDUCE_4 = SkinnyConfig("reduce", 1, 4, 128, 2, 1, 1)
SWAP_128 = SkinnyConfig("dot", 16, 64, 128, 2, 4, 2, swap=True)
SPLIT_DOT_4 = SkinnyConfig("dot", 16, 32, 128, 2, 4, 2, swap=True)
WIDE_DOT_4 = SkinnyConfig("dot", 16, 32, 256, 1, 4, 2, swap=True, hold=False)

SMALL = [
    case(W8A16_ROWS, (1, 33, 200), BF16, "norm bias", config=REDUCE_8),
    case(W8A16_ROWS, (3, 63, 200), FP16, "norm residual strided"),
    case(W8A16, (1, 33, 208), BF16, "norm bias", config=SPLIT_REDUCE_4),
    case(W8A16, (1, 20, 256), FP16, "residual", "silu", SPLIT_REDUCE_4),
    case(W8A16, (3, 63, 208), FP16, "norm residual strided"),
    case(W8A16, (17, 40, 96), BF16, "", "silu"),
    case(FP8A16, (5, 40, 96), BF16),
    case(FP8A16, (1, 40, 200), BF16, "", "silu", REDUCE_8),
    case(W4A16, (1, 33, 384), BF16, "norm bias", config=SPLIT_REDUCE_4),
    case(W4A16_32, (1, 20, 480), FP16, "residual strided", config=SPLIT_REDUCE_4),
    case(W4A16_64, (2, 12, 320), BF16, "norm", "silu", SPLIT_REDUCE_4),
    case(W4A16, (3, 63, 384), BF16, "norm residual"),
    case(W4A16_64, (17, 40, 320), FP16, "bias strided"),
    case(W4A16_32, (5, 40, 480), BF16, "norm", "silu", SPLIT_DOT_4),
    case(W4A16, (64, 32, 256), BF16, "", "gelu"),
    case(W4A16, (16, 40, 384), FP16, config=WIDE_DOT_4),
    case(W8A8, (3, 63, 200), BF16, "bias residual"),
    case(W8A8, (1, 40, 256), FP16, config=REDUCE_8),
    case(W8A8, (17, 40, 256), BF16, "", "silu", SWAP_128),
    case(FP8_TENSOR, (3, 63, 200), BF16, "bias"),
    case(FP8_ROW, (17, 40, 256), FP16, "residual", config=SWAP_128),
    case(FP8_ROW, (1, 40, 256), BF16, config=REDUCE_8),
    case(FP8_BLOCK, (3, 200, 320), BF16),
    case(FP8_BLOCK, (17, 72, 256), BF16, "", "silu", SWAP_128),
]
FORMS = (W8A16, W8A16_ROWS, FP8A16, W4A16, W4A16_64, W4A16_32, W8A8, FP8_TENSOR, FP8_ROW, FP8_BLOCK)
LARGE = [
    case(form, (rows, outputs, depth), dtype, extras)
    for form in FORMS
    for rows in (1, 16, 33, 64)
    for outputs, depth in [(4096, 4096), (1000, 5120), (512, 14336)]
    for dtype, extras in [(BF16, "residual strided"), (FP16, "bias")]
]
LARGE += [case(form, (1, 2048, 4096), BF16, "", "silu") for form in FORMS]
# Short groups are left out: their rounded weights count twice in a gated pair, more than the table
# of tolerances allows.
LARGE += [case(form, (16, 2048, 4096), BF16, "", "silu") for form in FORMS if form.group == 128]
LARGE += [case(form, (rows, 4096, 4096), BF16, "norm") for form in FORMS[:6] for rows in (1, 16)]
LARGE += [case(W8A16, (1, 70_000, 32_768)), case(FP8_ROW, (16, 70_000, 32_768))]  # past 2^31
BENCH = [
    case(form, (rows, *PROJECTIONS[name]), BF16, "baseline", name=name)
    for form in (W8A16, W4A16, FP8_ROW, FP8_BLOCK, W8A8)
    for name in PROJECTIONS
    for rows in (1, 16, 64)
]
# As a layer of a model has them.
GATE_UP = (PROJECTIONS["gate_up"][0] // 2, PROJECTIONS["gate_up"][1])
for layer_form in (W8A16, W4A16, FP8A16):
    for num_rows in (1, 16):
        BENCH += [
            case(layer_form, (num_rows, *PROJECTIONS["qkv"]), BF16, "norm", name="qkv"),
            case(layer_form, (num_rows, *GATE_UP), BF16, "norm", "silu", name="gate_up"),
        ]
# The head of Llama-3.1-8B, where a recipe has it in int8.
BENCH += [case(W8A16, (rows, 128256, 4096), BF16, "baseline", name="head") for rows in (1, 16)]
for name in ("o", "down"):
    BENCH.append(case(FP8A16, (1, *PROJECTIONS[name]), BF16, "residual", name=name))
COMPILE = [case(form, (rows, 4096, 1024)) for form in FORMS for rows in (1, 16, 64)]
COMPILE += [
    case(form, (rows, 4096, 1024), BF16, "norm", "silu")
    for form in (W8A16, W4A16)
    for rows in (1, 16)
]


def search(
    x_MD: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zero_GO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    activation: Activation | None = None,
    **_: Any,
) -> ConfigSearch:
    rows, depth = x_MD.numel() // x_MD.shape[-1], x_MD.shape[-1]
    gated, normed = activation is not None, norm_weight_D is not None
    outputs = weight.shape[0] // (2 if gated else 1)
    packed = weight.dtype == torch.int32
    bits = packed_bits(weight, depth) if packed else 8
    target = target_of(x_MD)
    if packed:
        space = search_space(rows, outputs, depth, gated, bits)
        configs = shortlist(space, outputs, gated, target, bits)
    else:  # codes go to the matrix units as they are: what would be chosen, beside the CUDA kernels
        configs = [default_config(x_MD, weight, scale_kind(weight_scale), gated, target)]
        if x_MD.dtype != weight.dtype:  # and are converted in registers else
            space = plain_rows_space(rows, outputs, depth, gated, bits)
            configs += shortlist(space, outputs, gated, target, bits)
    in_cuda = cuda_configs(cuda.kind_of(x_MD, weight), rows, outputs, depth, gated)
    if packed and bits == 4:
        groups = Groups(depth // weight_scale.shape[0], zero_GO is not None)
        fits = partial(
            groups.fits, num_outputs=outputs, depth=depth, gated=gated, num_units=target.num_units
        )
        in_cuda = [split for split in in_cuda if isinstance(split, WorkSplit) or fits(split)]
    op, key = choice_key(x_MD, weight, weight_scale, gated, normed)
    return ConfigSearch(op, key, [*configs, *in_cuda])


OP = Op(
    name="quantized_linear",
    summary="1 to 64 rows times 4-bit, int8 or fp8 weights, x in 16 bits or in codes",
    **functions(define, launch, cost, cublas=cublas, scaled_mm=torch_scaled_mm),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    supports=supports,
    search=search,
    variants={
        "triton": launch_triton,
        "cuda": launch_cuda,
        "portable": partial(launch_cuda, defines=("RIDGELINE_PORTABLE",)),
    },
)
