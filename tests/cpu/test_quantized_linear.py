"""Projections with quantized weights against the same product with decoded weights: the layer, the
CPU kernel behind it, the swap in a model, and sizes.
"""

from __future__ import annotations

import pytest
import torch
from engines import tiny
from kernel_checks import poisoned_memory
from test_memory_plan import small_config
from torch import Tensor
from torch.nn import functional

from ridgeline.engine.loading.host_model import on_host
from ridgeline.engine.loading.host_quantized import HostQuantizedLinear
from ridgeline.errors import NumericsError, UnsupportedError, UsageError
from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels import host_library
from ridgeline.kernels.gated_activation import Activation, gated_activation
from ridgeline.kernels.quantized_linear import Operands, cpu, many_rows, reference
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.kernels.targets import TARGETS
from ridgeline.kernels.tolerance import bound, check
from ridgeline.models import build_model, fill_random
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import RMSNorm
from ridgeline.quantization.devices import check_runs, check_target
from ridgeline.quantization.linear import (
    CodedRows,
    QuantizedLinear,
    quantizable,
    quantize_blocks,
    with_schemes,
)
from ridgeline.quantization.nearest import quantize_nearest
from ridgeline.quantization.scheme import decode, encode, find_grid, parse_scheme
from ridgeline.quantization.sizes import weight_bytes

SCHEMES = ["int8", "int4-g32", "int4-g64-asym", "int4-g128", "w8a8-int8", "fp8", "fp8-tensor",
           "fp8-block"]  # fmt: skip
BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def built() -> bool:
    return host_library.find_compiler() is not None and host_library.prepare()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(
    name: str, num_outputs: int = 256, depth: int = 384, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    weight_OD, scheme = random(num_outputs, depth) * depth**-0.5, parse_scheme(name)
    codes = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    return QuantizedLinear(codes, scheme, dtype, random(num_outputs, seed=5).to(dtype))


def on_cpu_kernels(layer: QuantizedLinear) -> HostQuantizedLinear:
    made = with_kinds(layer, lambda kind: HostQuantizedLinear)
    assert isinstance(made, HostQuantizedLinear)
    return made


def norm_of(depth: int, dtype: torch.dtype, offset: float = 1.0) -> RMSNorm:
    norm = RMSNorm(depth, 1e-5, offset)
    norm.weight = torch.nn.Parameter((0.3 * random(depth, seed=9)).to(dtype), requires_grad=False)
    return norm


def defined(
    layer: QuantizedLinear,
    x_TD: Tensor,
    norm: RMSNorm | None,
    activation: Activation | None,
    residual_TO: Tensor | None,
) -> Tensor:
    """In fp64, with the weight decoded and x rounded to its codes by the definition."""
    x = x_TD.double()
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        x = x * (norm.weight.double() + norm.offset)
    if layer.inputs is not None:
        by_blocks = layer.scheme.spread == "block"
        make = (
            quantize_blocks if by_blocks else lambda x, dtype: CodedRows(*quantize_rows(x, dtype))
        )
        codes, scale = make(x.float(), layer.inputs)
        x = codes.double() * reference.spread(scale, codes.shape, (1, 128)).double()
    assert layer.bias is not None, "these layers have one"
    y = functional.linear(x, layer.decoded().double(), layer.bias.double())
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = {"silu": functional.silu, "gelu": functional.gelu}[activation](gate) * up
    return (y if residual_TO is None else y + residual_TO.double()).to(x_TD.dtype)


CASES = [  # rows, norm, activation, residual
    (1, True, None, False),
    (1, False, "silu", True),
    (7, True, "gelu", False),
    (32, False, None, True),
    (33, True, "silu", True),
]


@pytest.mark.parametrize("on_kernels", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_is_the_product_with_its_decoded_weight(
    name: str, dtype: torch.dtype, on_kernels: bool
) -> None:
    layer = layer_of(name, dtype=dtype)
    run = on_cpu_kernels(layer) if on_kernels else layer
    for rows, normed, activation, added in CASES:
        x_TD = random(rows, 384, seed=rows).to(dtype)
        norm = norm_of(384, dtype) if normed else None
        num_outputs = 256 if activation is None else 128
        residual_TO = random(rows, num_outputs, seed=3).to(dtype) if added else None
        about = (norm, activation, residual_TO)
        with poisoned_memory():
            found = run(x_TD, *about)
        expected = defined(layer, x_TD, *about)
        if layer.inputs is None:
            check(found, expected, dtype, 384, roundings=4 if dtype == BF16 else 1)
        else:  # a last bit of the norm may choose the neighbouring code, seldom
            rounded_before = dtype == BF16 and name == "fp8-block"  # the norm's result is, there
            allowed = (2e-2 if rounded_before else 2e-3) + bound(dtype, 384, roundings=4)
            assert (found - expected).norm() / expected.norm() < allowed
        out_TO = torch.empty_like(expected)
        assert run(x_TD, *about, out_TO=out_TO) is out_TO
        assert torch.equal(out_TO, found)


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "w8a8-int8", "fp8"])
@pytest.mark.parametrize("shape", [(33, 120), (1, 16), (50, 7)])
def test_sizes_that_fill_no_vector(name: str, shape: tuple[int, int]) -> None:
    layer, x_TD = layer_of(name, *shape), random(3, 2 * shape[1])[:, ::2]  # strided, too
    check(on_cpu_kernels(layer)(x_TD), defined(layer, x_TD, None, None, None), x_TD.dtype, 120)


@needs_compiler
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_weight_expanded_is_the_weight_decoded(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(name, dtype=dtype)
    product = cpu.HostProduct(384, dtype, layer.weight, layer.scale, layer.zero)
    assert torch.equal(product.expanded(), layer.decoded().to(dtype))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_kept_form_stands_for_what_the_codes_do(name: str) -> None:
    weight_OD, scheme = random(256, 384), parse_scheme(name)
    codes = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    layer = QuantizedLinear(codes, scheme, torch.float32)
    assert torch.equal(layer.decoded(), decode(codes, scheme))
    assert layer.bias is None


@pytest.mark.parametrize("rows", [17, 40, 300])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_many_rows_of_int8_codes(
    rows: int, activation: Activation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of the rows, the last of which begins in the one before."""
    monkeypatch.setattr(many_rows, "MAX_COPY_BYTES", 8 * 64 * 100)
    x, x_scale = quantize_rows(random(rows, 96), torch.int8)
    weight, scale = quantize_rows(random(64, 96, seed=1), torch.int8)
    bias, residual = random(64, seed=2), random(rows, 64 if activation is None else 32, seed=3)
    assert many_rows.can_int_mm(x, weight)
    fused = FusedParts(bias, residual, activation=activation)
    given = Operands(x, weight, scale, None, x_scale)
    found = many_rows.int8_linear(given, fused, torch.float32)
    expected = reference.quantized_linear(given, fused, torch.float32)
    check(found, expected, torch.float32, 96)


def test_an_mlp_hands_codes_from_one_product_to_the_next() -> None:
    """Only where the second one takes them."""
    model = with_kinds(tiny("llama-mha"), lambda kind: kind)
    quantize_nearest(model, parse_scheme("w8a8-int8"), skip=("layers.1.mlp.down", "layers.2.*"))
    gives = [getattr(layer.mlp.gate_up, "gives", None) for layer in model.layers[:2]]
    assert gives == [torch.int8, None]
    x_TD, mlp, norm = random(5, 48), model.layers[0].mlp, norm_of(48, torch.float32)
    between = mlp.gate_up(x_TD, norm, mlp.activation)
    assert isinstance(between, CodedRows)
    assert between.codes.dtype == torch.int8
    plain = gated_activation(functional.linear(norm(x_TD), mlp.gate_up.decoded()), mlp.activation)
    expected = functional.linear(plain, mlp.down.decoded())
    assert (mlp(x_TD, norm) - expected).norm() / expected.norm() < 0.02  # two roundings of x


def test_layers_are_swapped_in_a_copy() -> None:
    model = tiny("llama-mqa-bias")
    scheme, name = parse_scheme("int8"), "layers.1.mlp.down"
    weight_OD = quantizable(model)[name].weight
    codes = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    copy = with_schemes(model, {name: (codes, scheme)})
    swapped = copy.get_submodule(name)
    assert isinstance(swapped, QuantizedLinear)
    assert swapped.bias is quantizable(model)[name].bias
    assert len(quantizable(copy)) == len(quantizable(model)) - 1  # the model stays what it was
    assert copy.layers[0].mlp.down.weight is model.layers[0].mlp.down.weight
    with pytest.raises(UsageError, match=r"'layers.1.mlp.dwn' is not a projection .* did you mean"):
        with_schemes(model, {"layers.1.mlp.dwn": (codes, scheme)})
    with pytest.raises(UsageError, match="'head' is not a projection"):
        with_schemes(model, {"head": (codes, scheme)})


def test_what_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = with_kinds(tiny("mixtral"), lambda kind: kind)
    quantize_nearest(model, parse_scheme("int8"), skip=("layers.0.*",))
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if "." in name}
    quantized = {name for name, kind in kinds.items() if kind == "QuantizedLinear"}
    assert quantized == {f"layers.{i}.attn.{part}" for i in (1, 2) for part in ("qkv", "out")}
    assert "experts are not quantized" in caplog.text
    caplog.clear()
    model = with_kinds(
        tiny("qwen3"), lambda kind: kind
    )  # out has rows of 120, the others of 48, 80
    with pytest.raises(UsageError, match=r"int4-g64 fits none .* 48 or 80 or 120 .* try int8"):
        quantize_nearest(model, parse_scheme("int4-g64"))
    with pytest.raises(UsageError, match=r"skip has 'layers.9.\*', which names no projection"):
        quantize_nearest(model, parse_scheme("int8"), skip=("layers.9.*",))
    wide = fill_random(build_model(small_config("llama-3.1-8b", hidden_size=320), BF16, "cpu"))
    quantize_nearest(wide, parse_scheme("int4-g128"))
    assert "does not fit 4 of 8 projections (layers.0.attn.qkv …)" in caplog.text
    assert isinstance(wide.layers[0].mlp.down, QuantizedLinear)


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = fill_random(build_model(small_config("llama-3.1-8b"), torch.float32, "cpu"))
    model.layers[1].attn.out.weight[3, 7] = torch.inf
    with pytest.raises(NumericsError, match=r"layers.1.attn.out has weights that are NaN or inf"):
        quantize_nearest(model, parse_scheme("int8"))


@pytest.mark.parametrize(("family", "dtype"), [("llama-3.1-8b", BF16), ("mixtral-8x7b", BF16),
                                               ("qwen2.5-7b", torch.float32)])  # fmt: skip
def test_sizes_are_what_a_model_holds(family: str, dtype: torch.dtype) -> None:
    about = {"intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 50}
    config = small_config(family, **about)
    plain = fill_random(build_model(config, dtype, "cpu"))
    for name in SCHEMES:
        model = quantize_nearest(with_kinds(plain, lambda kind: kind), parse_scheme(name))
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert weight_bytes(config, dtype, parse_scheme(name)) == held, name


def test_hosted_layers_are_of_their_own_kind() -> None:
    model = quantize_nearest(with_kinds(tiny("llama-mha"), lambda kind: kind), parse_scheme("int8"))
    hosted = on_host(model)
    assert isinstance(hosted.layers[0].mlp.down, HostQuantizedLinear)
    assert type(model.layers[0].mlp.down) is QuantizedLinear


def test_a_device_that_cannot_run_a_scheme_names_one_that_it_can() -> None:
    for name in SCHEMES:
        check_runs(parse_scheme(name), "fp32", "cpu")
        check_target(parse_scheme(name), TARGETS["sm_90"])
    for target, why in (("sm_80", "has no fp8"), ("gfx942", "has another kind of fp8")):
        with pytest.raises(UnsupportedError, match=rf"{target} {why}.*; use int8, int4-g128 or"):
            check_target(parse_scheme("fp8"), TARGETS[target])
        check_target(parse_scheme("w8a8-int8"), TARGETS[target])
    with pytest.raises(UnsupportedError, match="use --dtype bf16 or fp16"):
        check_runs(parse_scheme("int8"), "fp32", "cuda:0")
