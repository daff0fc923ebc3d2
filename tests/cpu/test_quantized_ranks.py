"""Weights that are codes, shared by ranks: the codes of one device, cut, and so its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import quantized_files as files
import tiny_models
import torch
from engines import assert_idle, engine_for, prompts_of
from test_quantized_reading import AWQ, DEEPSEEK, GPTQ, PACKED
from thread_ranks import ThreadedEngine
from torch import Tensor

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.local import ranks
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.models import Transformer
from ridgeline.models.transformer import Block, Fusion
from ridgeline.parallel.inference.coded import check_cut, schemes_by_layer
from ridgeline.parallel.inference.tensor import RowSum
from ridgeline.quantization import load_model
from ridgeline.quantization.choose import LayerChoice, ProductTimes
from ridgeline.quantization.files.matrix import cut_columns
from ridgeline.quantization.linear import QuantizedLinear, quantizable, replace_layer
from ridgeline.quantization.nearest import nearest_codes, quantize_nearest
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import named_matrices
from ridgeline.recipe import Parallel, Recipe

GREEDY = Sampling(max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of([21, 30, 9])
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
# Of every form of codes; those with 8-bit inputs of which a scale is not of one rank's alone.
SAME_INPUTS = ["int8", "int4-g128", "int4-g32", "int4-g64-asym", "fp8-block"]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint whose halves groups and blocks divide, with biases."""
    more = {"attention_bias": True, "mlp_bias": True}
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE | more))
    tiny_models.save_model("wide", tmp_path)
    return tmp_path


def tokens_of(outputs: Sequence[Output]) -> list[Any]:
    assert all(output.status == "finished" for output in outputs), outputs[0].reason
    return [output.tokens for output in outputs]


def assert_as_on_one(model: Transformer | Path, size: int = 2, **changes: Any) -> None:
    alone = engine_for(model, **changes)  # type: ignore[arg-type]
    expected = tokens_of(alone.generate(PROMPTS, GREEDY))
    with ThreadedEngine(model, size, **changes) as engine:
        assert tokens_of(engine.engine.generate(PROMPTS, GREEDY)) == expected
        assert_idle(engine.engine)
        assert_all_cut(alone.model, engine)


def assert_all_cut(whole: Transformer, engine: ThreadedEngine) -> None:
    """What is codes on one device is codes on every rank, and no rank has them whole."""
    for runner in engine.runners.values():
        part = dict(runner.model.named_modules())
        for name, layer in whole.named_modules():
            if isinstance(layer, QuantizedLinear):
                held = part[name]
                assert isinstance(held, QuantizedLinear), name
                assert held.weight.nbytes < layer.weight.nbytes, name


@pytest.mark.parametrize("scheme", SAME_INPUTS)
def test_a_plain_checkpoint_is_rounded_whole_and_then_cut(scheme: str, wide: Path) -> None:
    assert_as_on_one(wide, scheme=scheme)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_four_ranks_and_a_model_that_is_there(scheme: str, kernels: Any, wide: Path) -> None:
    model = load_model(wide, dtype="fp32", device="cpu")
    assert_as_on_one(model, size=4, scheme=scheme, head="int8", kernels=kernels)


class RoundedInParts(QuantizedLinear):
    """What ranks make of a product that reads inputs of all of them: each rounds its own."""

    pieces: list[QuantizedLinear]

    def project(self, x_TD: Any, fusion: Fusion) -> Tensor:
        assert isinstance(x_TD, Tensor)
        parts = x_TD.chunk(len(self.pieces), -1)
        total = sum(piece(part) for piece, part in zip(self.pieces, parts, strict=True))
        return total if fusion.residual is None else total + fusion.residual


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("scheme", ["w8a8-int8", "fp8", "fp8-tensor"])
def test_each_rank_rounds_its_own_inputs(
    scheme: str, kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One device that does as the ranks do says the same, token by token."""
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE))
    tiny_models.save_model("wide", tmp_path)
    plain = load_model(tmp_path, dtype="fp32", device="cpu")
    expected = engine_for(in_parts(plain, parse_scheme(scheme), 2), kernels="reference")
    with ThreadedEngine(tmp_path, scheme=scheme, kernels=kernels) as engine:
        found = tokens_of(engine.engine.generate(PROMPTS, GREEDY))
        row = engine.runners[1].model.layers[0].mlp.down
        assert isinstance(row, RowSum)
        assert row.inputs is not None
    assert found == tokens_of(expected.generate(PROMPTS, GREEDY))


def in_parts(plain: Transformer, scheme: Scheme, size: int) -> Transformer:
    coded = quantize_nearest(deepcopy(plain), scheme)
    for name, linear in quantizable(plain).items():
        if not name.endswith((".out", ".down")):
            continue
        whole, width = nearest_codes(name, linear.weight, scheme), linear.in_features // size
        pieces = [
            cut_columns(whole, slice(start, start + width))
            for start in range(0, linear.in_features, width)
        ]
        layer: Any = QuantizedLinear(whole.codes, scheme, torch.float32)
        layer.__class__ = RoundedInParts
        layer.pieces = [QuantizedLinear(*piece, torch.float32) for piece in pieces]
        replace_layer(coded, name, layer)
    for block in coded.layers:
        assert isinstance(block, Block)
        block.mlp.gate_up.gives = None  # codes, with scales for all of its outputs
    return coded


@pytest.mark.parametrize(
    ("writer", "config"),
    [
        (files.awq_writer(32), AWQ),
        (files.gptq_writer(32), GPTQ),
        (files.packed_writer(64), PACKED),
        (files.fp8_writer((128, 128), "weight_scale_inv"), DEEPSEEK),
    ],
)
def test_codes_of_other_tools_are_cut(
    writer: files.Writer, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE))
    files.write_checkpoint(tmp_path, "wide", writer, config)
    assert_as_on_one(tmp_path)


def test_codes_of_another_tool_in_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second stage's are those of the later layers, and the plan counts them so."""
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE | {"num_hidden_layers": 3}))
    files.write_checkpoint(tmp_path, "wide", files.gptq_writer(32), GPTQ)
    coded = load_model(tmp_path, dtype="fp32", device="cpu", keep_codes=True)
    expected = tokens_of(engine_for(tmp_path).generate(PROMPTS, GREEDY))  # type: ignore[arg-type]
    with ThreadedEngine(tmp_path, parallel=Parallel(pipeline=2)) as ranks:
        assert tokens_of(ranks.engine.generate(PROMPTS, GREEDY)) == expected
        models = [ranks.runners[rank].model for rank in range(2)]
        assert max(map(held_bytes, models)) == ranks.engine.memory_plan.bytes_of("weights")
        assert torch.equal(models[1].layers[-1].mlp.down.weight, coded.layers[-1].mlp.down.weight)


def test_ranks_agree_on_what_stays_plain(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each times its own part. What is slower on one is plain on all, as in the plan."""
    group_of = {}

    def timed(config: Any, scheme: Scheme, *_: Any, **__: Any) -> list[LayerChoice]:
        shapes = dict.fromkeys(matrix for _, matrix in named_matrices(config))
        slow = len(group_of) == 1  # on whoever comes second
        group_of[len(group_of)] = None
        return [
            LayerChoice(*shape, scheme.name, (ProductTimes(1, 1.0, 2.0 if slow and i else 0.5),))
            for i, shape in enumerate(shapes)
        ]

    monkeypatch.setattr("ridgeline.engine.loading.load_plan.measured_choices", timed)
    with ThreadedEngine(wide, scheme="int8", quantize_all=False) as engine:
        models = [engine.runners[rank].model for rank in range(2)]
        found = [
            {name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
            for model in models
        ]
        plan = engine.engine.memory_plan
        assert plan.bytes_of("weights") == held_bytes(models[0])
        tokens_of(engine.engine.generate(PROMPTS, GREEDY))
    assert found[0] == found[1] == {"layers.0.attn.qkv", "layers.1.attn.qkv"}


def held_bytes(model: Transformer) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["int8", "int4-g64-asym", "fp8-block"])
def test_the_plan_counts_the_codes_of_a_rank(scheme: str, wide: Path) -> None:
    with ThreadedEngine(wide, scheme=scheme, head="int8", kernels="reference") as engine:
        planned = engine.engine.memory_plan.bytes_of("weights")
        assert planned == held_bytes(engine.runners[0].model)  # it has the biases too


# --- what cannot be cut ---------------------------------------------------------------------


@pytest.fixture
def _no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Ranks", None)  # must not be reached


@pytest.mark.usefixtures("_no_start")
@pytest.mark.parametrize(
    ("scheme", "size", "says"),
    [
        ("int4-g128", 4, "a rank has 64 inputs of layers.0.attn.out, and 128 share .* int4-g64 or"),
        ("int4-g128-asym", 8, "128 share a scale; try scheme int4-g32-asym or tensor_parallel 2$"),
        ("fp8-block", 4, "192 outputs of layers.0.attn.qkv, and 128 share a scale; try scheme fp8"),
    ],
)
def test_groups_that_ranks_cannot_share_are_refused(
    scheme: str, size: int, says: str, wide: Path
) -> None:
    recipe = Recipe(scheme=scheme, parallel=Parallel(tensor=size))
    with pytest.raises(UsageError, match=says) as raised:
        Engine(wide, recipe, device="cpu")
    assert "\n" not in str(raised.value)
    config = load_model(wide, dtype="fp32", device="cpu").config
    known = parse_scheme(scheme)
    check_cut(config, 2, schemes_by_layer(config, known))  # as it says
    for other in ("int4-g32-asym", "fp8"):
        check_cut(config, size, schemes_by_layer(config, parse_scheme(other)))


def test_a_checkpoints_groups_that_ranks_cannot_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE))
    files.write_checkpoint(tmp_path, "wide", files.gptq_writer(64), GPTQ | {"group_size": 64})
    with pytest.raises(UsageError, match=r"64 share a scale; try tensor_parallel 4$"):
        ThreadedEngine(tmp_path, size=8)


@pytest.mark.usefixtures("_no_start")
def test_what_is_quantized_already_is_not_quantized_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(tiny_models.MODELS, "wide", ("Llama", WIDE))
    files.write_checkpoint(tmp_path, "wide", files.gptq_writer(32), GPTQ)
    with pytest.raises(UsageError, match="is quantized already; remove --scheme"):
        Engine(tmp_path, Recipe(scheme="int8", parallel=Parallel(2)), device="cpu")
    coded = load_model(tmp_path, dtype="fp32", device="cpu", keep_codes=True)
    with pytest.raises(UnsupportedError, match="give the path of the quantized checkpoint"):
        Engine(coded, Recipe(parallel=Parallel(2)))
