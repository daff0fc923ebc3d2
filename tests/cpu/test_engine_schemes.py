"""`Recipe.scheme`: every family through the engine with quantized weights gives, token by token,
what the plain loop gives with the same weights decoded.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocations
from engines import assert_exact, engine_for, naive_outputs, prompts_of, tiny
from tiny_models import one_of_each_family, save_model
from torch import Tensor

import ridgeline.quantization.nearest
from ridgeline.cli import main
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.loading.load_plan import planned
from ridgeline.engine.loading.loading import load
from ridgeline.engine.memory.plan import itemise
from ridgeline.errors import OutOfMemoryError, UnsupportedError, UsageError
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.shapes import RandomShape, describe_shape
from ridgeline.models.transformer import Linear
from ridgeline.quantization.choose import LayerChoice, ProductTimes
from ridgeline.quantization.linear import COPIED_FROM, QuantizedLinear, keep_copies, quantizable
from ridgeline.quantization.nearest import load_nearest, nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import named_matrices
from ridgeline.recipe import Limits, Parallel, Recipe, with_auto

FAMILIES = one_of_each_family(
    "llama-mqa-bias", "smollm3", "mistral-sliding", "qwen2", "qwen3", "mixtral"
)
GREEDY = Sampling(max_tokens=6, ignore_eos=True)


def decoded(model: Transformer) -> Transformer:
    """The same model with plain projections, whose weights are what the codes stand for."""
    copy = with_kinds(model, lambda kind: kind)
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, QuantizedLinear):
            parent, _, own = name.rpartition(".")
            plain = Linear(layer.in_features, layer.out_features, layer.bias is not None)
            plain.weight = torch.nn.Parameter(layer.decoded(), requires_grad=False)
            plain.bias = layer.bias
            setattr(copy.get_submodule(parent), own, plain)
    return copy


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_decoded_weights(name: str) -> None:
    """Prompts longer than the kernels for few rows take, and batches that grow and shrink."""
    engine = engine_for(tiny(name), scheme="int8")
    assert any(isinstance(m, QuantizedLinear) for m in engine.model.modules())
    prompts = prompts_of([45, 3])
    outputs = engine.generate(prompts, [GREEDY] * 2)
    plain = decoded(engine.model)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [output.tokens] == naive_outputs(plain, prompt, GREEDY)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "w8a8-int8", "fp8", "fp8-tensor"])
def test_schemes_through_the_engine(scheme: str, kernels: Any) -> None:
    """Against the plain loop over the same quantized model, where inputs are rounded too."""
    engine = engine_for(tiny("phi3-longrope-partial"), scheme=scheme, kernels=kernels)
    assert engine.recipe.scheme == scheme
    assert_exact(engine, prompts_of([40, 5]), [GREEDY] * 2)


def saved(folder: Path, name: str = "llama-mqa-bias") -> Path:
    save_model(name, folder)
    return folder


@pytest.mark.parametrize("name", ["llama-mqa-bias", "llama-tied", "phi3", "mixtral"])
def test_a_checkpoint_is_quantized_on_its_way_in(name: str) -> None:
    """The same model as by `Engine(model, …)`, and no plain weights are held longer than needed."""
    real, given = ridgeline.quantization.nearest.nearest, list[weakref.ref[Tensor]]()

    def watched(layer: str, weight_OD: Tensor, *about: Any) -> QuantizedLinear:
        assert not any(earlier() is not None for earlier in given), layer
        given.append(weakref.ref(weight_OD))
        return real(layer, weight_OD, *about)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.quantization.nearest.nearest", watched)
        path = saved(Path(folder), name)
        model = load_nearest(path, parse_scheme("int8"), torch.float32, "cpu")
    assert len(given) == len(quantizable(tiny(name)))
    expected = engine_for(tiny(name), scheme="int8").model
    found, wanted = (dict(m.named_parameters()) for m in (model, expected))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    if name == "llama-tied":
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_shape_is_quantized_while_it_is_drawn(dtype: str) -> None:
    """The same model as from weights that are all there, at a peak of its own size and one matrix:
    a shape that fits only quantized loads.
    """
    shape, limits = RandomShape("tiny:layers=12,width=256"), Limits(max_batch=2, token_budget=32)
    recipe = Recipe(dtype=dtype, scheme="int8", quantize_all=True, limits=limits)
    whole = shape.whole(parse_dtype(dtype), "cpu")
    largest = max(parameter.nbytes for parameter in whole.parameters())
    plain_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    expected = Engine(whole, recipe).model
    found = allocations(lambda: load(shape, recipe, None, "cpu", None))
    model = found.result.model
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert found.result.plan.bytes_of("weights") == held
    assert found.peak_bytes < held + 8 * largest  # in fp32 meanwhile, with what rounding needs
    assert found.peak_bytes < plain_bytes


def test_the_plan_is_what_the_model_holds(tmp_path: Path) -> None:
    limits = Limits(max_batch=2, token_budget=32)
    recipe = Recipe(dtype="fp32", scheme="int8", quantize_all=True, limits=limits)
    loaded = load(saved(tmp_path), recipe, None, "cpu", None)
    held = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert loaded.plan.bytes_of("weights") == held
    plain = itemise(loaded.model.config, replace(loaded.recipe, scheme=None), 2**30)
    assert held < plain.bytes_of("weights")


def test_a_model_that_was_given_stays_what_it_was() -> None:
    model = tiny("llama-mha")
    engine = engine_for(model, scheme="int8")
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert engine.model.embed.weight is model.embed.weight
    plan = load(engine.model, Recipe(), None, "cpu", None).plan  # quantized before, as it is
    assert plan.bytes_of("weights") == sum(p.nbytes for p in engine.model.parameters())
    with pytest.raises(UsageError, match="scheme is int8, and the model is quantized already"):
        engine_for(engine.model, scheme="int8")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"scheme": "int5"}, UsageError, "'int5' is unknown; choose from int8"),
        ({"scheme": "int4-g48"}, UsageError, "groups of 48; use 32, 64 or 128"),
        ({"scheme": "int4-g128"}, UsageError, "int4-g128 fits none"),
        ({"scheme": "int8", "deterministic": True}, UnsupportedError, "deterministic and scheme"),
    ],
)
def test_what_cannot_be_is_one_line(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, "llama-mha")
    ways: list[Callable[[], Engine]] = [
        lambda: engine_for(tiny("llama-mha"), **changes),
        lambda: Engine(path, Recipe(dtype="fp32", **changes), device="cpu", num_pages=8),
    ]
    for way in ways:
        with pytest.raises(error, match=said) as raised:
            way()
        assert "\n" not in str(raised.value)


def test_short_memory_is_answered_with_a_scheme() -> None:
    config = describe_shape("llama-3.1-8b").config
    given = Recipe(limits=Limits(max_context=1024))
    filled = with_auto(given, config, torch.bfloat16, "cuda:0")
    for schemes, said in ((("int8",), "use --scheme int8"), ((), "smaller model")):
        with pytest.raises(OutOfMemoryError, match=said):
            planned(config, given, filled, "cpu", 14 * 2**30, schemes=schemes)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", "demo", "Hi", "--scheme", "int5", "--device", "cpu"])
    assert code == UsageError.exit_code
    assert "'int5' is unknown" in capsys.readouterr().err


def test_copies_are_counted_and_refused_where_they_serve_nobody() -> None:
    """Only codes with 16-bit inputs have them; on a CPU the flag would be ignored."""
    config = tiny("llama-mha").config
    recipe = with_auto(Recipe(scheme="int8", copies=True), config, torch.bfloat16, "cuda")
    plan = itemise(config, recipe, 1 << 34)
    matrices = sum(m.num_outputs * m.depth for _, m in named_matrices(config))
    assert plan.bytes_of("copies") == 2 * matrices
    assert itemise(config, replace(recipe, copies=False), 1 << 34).bytes_of("copies") == 0
    assert itemise(config, replace(recipe, scheme="fp8"), 1 << 34).bytes_of("copies") == 0
    for refused, why in (
        (Recipe(scheme="int8", copies=True), "on a GPU, and the device is a CPU"),
        (Recipe(deterministic=True, copies=True), "deterministic and copies"),
        (Recipe(parallel=Parallel(2), copies=True), "several ranks and copies"),
    ):
        filled = with_auto(refused, config, torch.bfloat16, "cpu")
        with pytest.raises(UnsupportedError, match=why):
            planned(config, refused, filled, "cpu", 1 << 34)


def test_many_rows_go_to_the_copy_and_few_to_the_codes() -> None:
    """A copy that was changed shows who read it."""
    layer = nearest("a layer", torch.randn(64, 96), None, parse_scheme("int8"), torch.float32)
    x_TD = torch.randn(COPIED_FROM, 96)
    by_codes = layer(x_TD)
    layer.keep_copy()
    torch.testing.assert_close(layer(x_TD), by_codes)
    layer.copy.zero_()
    assert (layer(x_TD) == 0).all()
    torch.testing.assert_close(layer(x_TD[:-1]), by_codes[:-1])
    assert "copy" not in layer.state_dict()


def test_beside_a_copy_only_what_is_slower_for_the_fewest_rows_stays_plain() -> None:
    def choice(*speedups: float) -> LayerChoice:
        rows = (1, 16, 64)
        times = [ProductTimes(n, x, 1.0) for n, x in zip(rows, speedups, strict=False)]
        return LayerChoice(64, 96, "int8", tuple(times))

    assert choice(1.5, 1.2).with_copy().copied_from is None
    early = choice(1.5, 0.9).with_copy()
    assert (early.copied_from, early.quantize) == (2, True)
    assert choice(1.5, 1.2, 0.8).with_copy().copied_from == 17
    never = choice(0.9, 1.2).with_copy()
    assert (never.copied_from, never.quantize) == (None, False)

    layer = nearest("a layer", torch.randn(64, 96), None, parse_scheme("int8"), torch.float32)
    keep_copies(torch.nn.Sequential(layer), {(64, 96): 2})
    layer.copy.zero_()
    assert (layer(torch.ones(2, 96)) == 0).all()
    assert (layer(torch.ones(1, 96)) != 0).any()
