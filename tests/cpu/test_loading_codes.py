"""Loading a quantized checkpoint with its codes kept: the model is what the codes say, the weights
are never expanded on the way, and the plan knows beforehand what they take.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import quantized_files as files
import tiny_models
import torch
from allocations import allocations
from gguf_files import write_gguf
from test_families import PROMPT, all_logits
from test_quantized_reading import CASES

from ridgeline.engine.loading.loading import load
from ridgeline.engine.loading.sources import SCHEMES
from ridgeline.engine.memory.plan import itemise, plan_memory
from ridgeline.errors import OutOfMemoryError, UnsupportedError, UsageError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint
from ridgeline.models.families import describe, describe_hf
from ridgeline.models.shapes import SHAPES, describe_shape
from ridgeline.models.transformer import ExpertMLP
from ridgeline.quantization import load_model
from ridgeline.quantization.files import kept_schemes, open_quantized
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.load import runnable
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import expert_bytes, named_matrices, weight_bytes
from ridgeline.recipe import Limits, Recipe, edited, with_auto

Q4_0 = gguf.GGMLQuantizationType.Q4_0
GIB = 2**30
FORMATS = ["awq", "gptq", "gptq-sym", "packed", "fp8-rows", "fp8-tensor-static", "q4_0"]


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are large beside embedding and head, and small beside each other."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6}
    monkeypatch.setattr(tiny_models, "SMALL", tiny_models.SMALL | sizes)


def written(form: str, folder: Path, name: str = "llama-mha") -> Path:
    if form == "q4_0":
        write_gguf(tiny_models.make_model(name), folder / "model.gguf", Q4_0)
        return folder / "model.gguf"
    writer, config, _ = CASES[form]
    files.write_checkpoint(folder, name, writer, config)
    return folder


def kept(path: Path, dtype: str = "fp32") -> Transformer:
    return load_model(path, dtype=dtype, device="cpu", keep_codes=True)


def held_bytes(model: Transformer) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_never_expanded(form: str, tmp_path: Path) -> None:
    """The peak of all that is allocated (a mapped file counts as such): the model and a matrix,
    which is half a layer, never all its weights.
    """
    path = written(form, tmp_path)
    plain = load_model(path, dtype="fp32", device="cpu")
    layer_bytes = sum(parameter.nbytes for parameter in plain.layers[0].parameters())
    gc.collect()  # what others left is not to be counted as released
    loading = allocations(lambda: kept(path))
    model, mapped = loading.result, path / "model.safetensors"
    peak_bytes = loading.peak_bytes - (mapped.stat().st_size if mapped.is_file() else 0)
    assert {type(m) for m in model.layers.modules()} >= {QuantizedLinear}
    assert peak_bytes < held_bytes(model) + 0.5 * layer_bytes
    assert held_bytes(model) + 0.5 * layer_bytes < 0.4 * held_bytes(plain)  # as it was before
    assert weight_bytes(model.config, torch.float32, kept=planned_schemes(path)) == held_bytes(
        model
    )


def planned_schemes(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    return kept_schemes(checkpoint, describe(checkpoint))


@pytest.mark.parametrize("form", ["awq", "packed", "q4_0"])
@pytest.mark.parametrize("name", ["qwen2", "llama-tied", "phi3"])
def test_answers_are_those_of_the_expanded_weights(form: str, name: str, tmp_path: Path) -> None:
    """With biases, a tied head, and matrices that are fused in the checkpoint already."""
    path = written(form, tmp_path, name)
    model, plain = kept(path), load_model(path, dtype="fp32", device="cpu")
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 4 * 6
    about = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(all_logits(model, PROMPT), all_logits(plain, PROMPT), **about)
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert (model.head.weight is model.embed.weight) == model.config.tied_embeddings


def test_what_turns_out_to_be_no_matrix_comes_as_weights(tmp_path: Path) -> None:
    """The config says nothing of sorted columns; only the data does."""
    path = written("packed-sorted", tmp_path)
    assert planned_schemes(path)
    model, plain = kept(path), load_model(path, dtype="fp32", device="cpu")
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_schemes_that_differ_within_a_layer_come_as_weights(tmp_path: Path) -> None:
    """q in groups of 32 and k, v in groups of 64: no one matrix, for this layer alone."""
    finer, coarser = files.awq_writer(32), files.awq_writer(64)

    def write(layer: str, weight: torch.Tensor) -> files.Written:
        return (finer if "layers.3.self_attn.q" in layer else coarser)(layer, weight)

    files.write_checkpoint(tmp_path, "llama-mha", write, CASES["awq-g64"][1])
    model, plain = kept(tmp_path), load_model(tmp_path, dtype="fp32", device="cpu")
    assert "layers.3.attn.qkv" not in planned_schemes(tmp_path)
    assert torch.equal(model.layers[3].attn.qkv.weight, plain.layers[3].attn.qkv.weight)
    assert isinstance(model.layers[3].attn.out, QuantizedLinear)
    assert isinstance(model.layers[2].attn.qkv, QuantizedLinear)


def test_codes_do_not_wait_for_the_scales_of_other_layers(tmp_path: Path) -> None:
    """safetensors sorts a file by dtype: without another order all words would come first."""
    written("awq", tmp_path)
    quantized = open_quantized(open_checkpoint(tmp_path))
    assert quantized is not None
    assert num_changes(open_checkpoint(tmp_path)) > num_changes(quantized.checkpoint)
    layers = {name.rpartition(".")[0] for name in quantized.checkpoint.tensors}
    assert num_changes(quantized.checkpoint) == len(layers) - 1
    assert quantized.checkpoint.tensors.keys() == open_checkpoint(tmp_path).tensors.keys()


def num_changes(checkpoint: Checkpoint) -> int:
    """How often another layer comes."""
    layers = [name.rpartition(".")[0] for name in checkpoint.tensors]
    return sum(one != other for one, other in pairwise(layers))


def test_a_device_without_the_scheme_expands(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = {"layers.0.attn.qkv": parse_scheme("fp8"), "layers.0.attn.out": parse_scheme("int8")}

    def refuse(scheme: Any, dtype: str, device: str) -> None:
        if scheme.weight == "fp8":
            raise UnsupportedError("no fp8")

    monkeypatch.setattr("ridgeline.quantization.load.check_runs", refuse)
    run, problem = runnable(schemes, torch.bfloat16, "cuda:0")
    assert list(run) == ["layers.0.attn.out"]
    assert problem == "no fp8"


# --- the plan made before ---------------------------------------------------------------------


@pytest.mark.sweep(keep=5)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_plan_is_what_the_tensors_take(
    form: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and zero points, and what stays plain, biases and norms included."""
    monkeypatch.setattr("ridgeline.engine.loading.sources.tokenizer_of", lambda path: None)
    path = written(form, tmp_path, "llama-mqa-bias")
    about = {"limits": Limits(max_batch=2, token_budget=32), "kernels": "reference"}
    loaded = load(path, Recipe(dtype=dtype, **about), None, "cpu", None)
    assert any(isinstance(module, QuantizedLinear) for module in loaded.model.modules())
    assert loaded.plan.bytes_of("weights") == held_bytes(loaded.model)
    assert loaded.plan.bytes_of("expanded weight") == 16 * 2 * 192 * 64  # gate-up, by the reference
    again = load(loaded.model, Recipe(**about), None, "cpu", None)
    assert again.plan.bytes_of("weights") == held_bytes(loaded.model)
    fixed = load(path, Recipe(dtype=dtype, deterministic=True, **about), None, "cpu", None)
    assert fixed.plan.bytes_of("weights") == held_bytes(fixed.model) > held_bytes(loaded.model)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64-asym", "fp8-tensor"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed", "qwen2"])
def test_the_plan_of_a_scheme_is_what_the_tensors_take(
    name: str, scheme: str, tmp_path: Path
) -> None:
    tiny_models.save_model(name, tmp_path)
    limits = Limits(max_batch=2, token_budget=32)
    recipe = Recipe(dtype="bf16", scheme=scheme, quantize_all=True, limits=limits)
    loaded = load(tmp_path, recipe, None, "cpu", None)
    assert loaded.plan.bytes_of("weights") == held_bytes(loaded.model)
    experts = expert_bytes(loaded.model.config, torch.bfloat16)
    mlps = [m for m in loaded.model.modules() if isinstance(m, ExpertMLP)]
    assert experts == sum(mlp.gate_up.nbytes + mlp.down.nbytes for mlp in mlps)


def test_a_checkpoint_of_70b_in_4_bits_is_planned_at_its_size() -> None:
    config = describe_shape("llama-3.1-70b").config
    codes = {name: parse_scheme("int4-g128") for name, _ in named_matrices(config)}
    recipe = with_auto(Recipe(limits=Limits(8192, 16)), config, torch.bfloat16, "cuda:0")
    plan = plan_memory(config, recipe, 80 * GIB, kept=codes)
    # Layers 68.5 G weights, embedding and head 2.1 G; a scale takes 2 bytes for 128 weights.
    expected = 68.45e9 * (0.5 + 2 / 128) + 2.1e9 * 2
    assert plan.bytes_of("weights") == pytest.approx(expected, rel=0.005)
    with pytest.raises(OutOfMemoryError, match=r"use --scheme int4-g128$"):
        plan_memory(config, recipe, 80 * GIB, schemes=SCHEMES)


def test_the_scheme_advised_is_one_that_fits() -> None:
    """Rows of 576 have no groups of 128: int4-g128 would leave most of this model as it is."""
    config = describe_hf(SHAPES["smollm2-135m"] | {"num_hidden_layers": 600}).config
    recipe = with_auto(Recipe(limits=Limits(256, 8, 256)), config, torch.bfloat16, "cuda:0")

    def needed(scheme: str) -> int:
        return itemise(config, edited(recipe, "scheme", scheme), GIB).needed_bytes

    assert needed("int4-g64") < needed("int8") < needed("int4-g128")
    free = int(1.02 * needed("int4-g64") / 0.9)
    with pytest.raises(OutOfMemoryError, match=r"use --scheme int4-g64$"):
        plan_memory(config, recipe, free, schemes=SCHEMES)
    assert itemise(config, edited(recipe, "scheme", "int4-g64"), free).fits


def test_the_plan_refuses_before_anything_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line has a remedy; that of `load_model` alone cannot."""
    for module in ("engine.loading.sources", "quantization.load"):
        monkeypatch.setattr(f"ridgeline.{module}.available_memory", lambda device: 1000)
    path = written("q4_0", tmp_path)
    with pytest.raises(OutOfMemoryError, match=r"^needs .* a device with"):
        load(path, Recipe(), None, "cpu", None)


def test_a_quantized_checkpoint_has_its_scheme(tmp_path: Path) -> None:
    path = written("awq", tmp_path)
    with pytest.raises(UsageError, match=r"scheme is int8, but .* is quantized already; remove"):
        load(path, Recipe(scheme="int8"), None, "cpu", None)
