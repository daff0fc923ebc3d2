"""Quantized models saved as compressed-tensors: the bytes, the config, and that transformers with
the compressed-tensors package computes from them what we do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import PROMPT, all_logits

from ridgeline.errors import UnsupportedError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe, parts
from ridgeline.quantization import load_model
from ridgeline.quantization.files import (
    StoredMatrix,
    decoded_matrix,
    open_quantized,
    read_quantized,
    save_quantized,
)
from ridgeline.quantization.files.compressed import config_group, layer_tensors, scheme_config
from ridgeline.quantization.files.save import KVScales, SparsityPattern
from ridgeline.quantization.scheme import Codes, Grid, encode, find_grid, parse_scheme

SCHEMES = ["int8", "int4-g32", "int4-g64-asym", "w8a8-int8", "fp8", "fp8-tensor", "fp8-block"]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that groups and blocks divide, whatever the family overrides."""
    monkeypatch.setattr(tiny_models, "SMALL", tiny_models.SMALL | WIDE)
    for name in ("llama-tied", "qwen3", "gemma3"):
        family, overrides = tiny_models.MODELS[name]
        one_layer = {"num_hidden_layers": 2 if name == "gemma3" else 1}
        monkeypatch.setitem(tiny_models.MODELS, name, (family, overrides | HEADS | one_layer))


def quantized(
    folder: Path, name: str, *schemes: str
) -> tuple[Transformer, dict[str, StoredMatrix]]:
    """A model whose weights are what the codes stand for, each kind of layer in the next scheme."""
    tiny_models.save_model(name, folder)
    model = load_model(folder, dtype="fp32", device="cpu")
    matrices = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and not name.startswith(("embed", "head")):
            scheme = parse_scheme(schemes[len(matrices) % len(schemes)])
            codes = encode(weight.detach(), find_grid(weight.detach(), scheme), scheme)
            matrices[name] = StoredMatrix(codes, scheme)
    return model, matrices


def assert_same(ours: Transformer, theirs: Transformer) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


@torch.no_grad()
def expand(model: Transformer, matrices: dict[str, StoredMatrix]) -> Transformer:
    """The model with the weights its codes stand for, by the definition in scheme.py's table."""
    for name, ((values, grid), scheme) in matrices.items():
        weight = model.get_parameter(name.removesuffix(".weight") + ".weight")
        rows, columns = (weight.shape[dim] // grid.scale.shape[dim] for dim in (0, 1))
        zero = torch.tensor(8 if scheme.weight == "int4" else 0) if grid.zero is None else grid.zero
        for i, j in torch.cartesian_prod(*map(torch.arange, grid.scale.shape)).tolist():
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            of_part = zero if zero.dim() == 0 else zero[i, j]
            weight[part] = (values[part].float() - of_part) * grid.scale[i, j]
    return model


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_loaded(scheme: str, tmp_path: Path) -> None:
    """Also where a layer's tensors lie in several files."""
    model, matrices = quantized(tmp_path / "in", "llama-tied", scheme)
    out = tmp_path / "out"
    save_quantized(model, out, source=tmp_path / "in", matrices=matrices, max_shard_bytes=10_000)
    assert len(list(out.glob("*.safetensors"))) > 7
    kept = [one for _, one in read_quantized(open_checkpoint(tmp_path / "out"))]
    assert {one.scheme.name for one in kept if isinstance(one, StoredMatrix)} == {scheme}
    expand(model, matrices)
    assert_same(model, load_model(tmp_path / "out", dtype="fp32", device="cpu"))


def from_transformers(folder: Path) -> Any:
    """As the package loads it, with inputs left as they are: ours are not rounded here either."""
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = [layer for layer in peer.modules() if hasattr(layer, "quantization_scheme")]
    assert layers
    for layer in layers:
        layer.quantization_enabled = False
    return peer


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("llama-tied", ["int8"]),
        ("qwen3", ["int4-g32"]),
        ("gemma3", ["int4-g64-asym"]),
        ("llama-tied", ["w8a8-int8"]),
        ("qwen3", ["fp8"]),
        ("gemma3", ["fp8-tensor"]),
        ("llama-tied", ["fp8-block"]),
        ("qwen3", ["int4-g64", "fp8", "int8", "w8a8-int8"]),
    ],
)
def test_transformers_computes_the_same(name: str, schemes: list[str], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model, matrices = quantized(tmp_path / "in", name, *schemes)
    plain = all_logits(model, PROMPT)
    save_quantized(model, tmp_path / "out", source=tmp_path / "in", matrices=matrices)
    peer = from_transformers(tmp_path / "out")
    with torch.inference_mode():
        theirs = peer(torch.tensor([PROMPT])).logits[0]
    ours = all_logits(expand(model, matrices), PROMPT)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - plain).abs().max() > 1e-2  # codes are not the weights they were made of


@pytest.mark.usefixtures("wide")
def test_transformers_finds_the_scales_of_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model, matrices = quantized(tmp_path / "in", "llama-tied", "int8")
    scales = KVScales(torch.float8_e4m3fn, torch.tensor([0.25]), torch.tensor([0.5]))
    out, matrices = (
        tmp_path / "out",
        {key.removesuffix(".weight"): m for key, m in matrices.items()},
    )
    save_quantized(model, out, source=tmp_path / "in", matrices=matrices, kv_scales=scales)
    attention = from_transformers(out).model.layers[0].self_attn
    assert (attention.k_scale.item(), attention.v_scale.item()) == (0.25, 0.5)
    opened = open_quantized(open_checkpoint(out))
    assert opened is not None
    found = {name.rpartition(".")[2]: scale.item() for name, scale in opened.kv_scales().items()}
    assert found == {"k_scale": 0.25, "v_scale": 0.5}
    assert_same(expand(model, matrices), load_model(out, dtype="fp32", device="cpu"))
    by_head = KVScales(torch.int8, torch.arange(1.0, 5.0).view(1, 4), torch.ones(1, 4))
    out = tmp_path / "heads"
    save_quantized(model, out, source=tmp_path / "in", matrices=matrices, kv_scales=by_head)
    attention = from_transformers(out).model.layers[0].self_attn
    assert attention.k_scale.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    args = attention.quantization_scheme.input_activations
    assert (args.type, args.strategy) == ("int", "attn_head")


@pytest.mark.parametrize(("name", "scheme"), [("mixtral", "int4-g32"), ("qwen3-moe", "w8a8-int8")])
def test_experts_go_by_the_checkpoints_names(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads experts of packed codes and of fp8, but not of int8."""
    narrow = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    monkeypatch.setattr(tiny_models, "SMALL", tiny_models.SMALL | narrow)
    tiny_models.save_model(name, tmp_path / "in")
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    description, parameters = describe(open_checkpoint(tmp_path / "in")), model.named_parameters()
    held, chosen, matrices = dict(parameters), parse_scheme(scheme), {}
    for part in parts(description.config, description.names):
        weight = held[part.parameter].detach()[part.index]
        if "_proj.weight" in part.name or "experts" in part.name:
            codes = encode(weight, find_grid(weight, chosen), chosen)
            matrices[part.name] = StoredMatrix(codes, chosen)
            weight.copy_(decoded_matrix(matrices[part.name]))
    out = tmp_path / "out"
    save_quantized(model, out, source=tmp_path / "in", matrices=matrices)
    assert sum("experts" in key for key in matrices) > 10
    assert_same(model, load_model(out, dtype="fp32", device="cpu"))
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert [layer.rpartition(".")[2] for layer in ignored] == ["gate", "lm_head"]
    if scheme == "int4-g32":
        pytest.importorskip("compressed_tensors")
        with torch.inference_mode():
            theirs = from_transformers(out)(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(all_logits(model, PROMPT), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("scheme", ["int4-g32", "w8a8-int8"])
def test_zero_points_of_symmetric_codes_are_left_out(scheme: str, tmp_path: Path) -> None:
    """Older writers store them, all zero."""
    model, matrices = quantized(tmp_path / "in", "llama-tied", scheme)
    out = tmp_path / "out"
    save_quantized(model, out, source=tmp_path / "in", matrices=matrices)
    tensors = load_file(out / "model.safetensors")
    scales = [name for name in tensors if name.endswith("weight_scale")]
    for name in scales:
        zero = torch.zeros(tensors[name].shape, dtype=torch.int8)
        tensors[name.replace("weight_scale", "weight_zero_point")] = zero
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert_same(expand(model, matrices), load_model(out, dtype="fp32", device="cpu"))
    found = read_quantized(open_checkpoint(out))
    assert len(scales) == sum(isinstance(one, StoredMatrix) for _, one in found) == 7


def test_which_config_group_applies() -> None:
    """The most particular one, whatever their order: by name, by pattern, as a Linear."""
    groups = {
        "all": {"targets": ["Linear"], "weights": 0},
        "some": {"targets": ["Other", "re:.*mlp.*"], "weights": 1},
        "one": {"targets": ["a.mlp.up"], "weights": 2},
    }
    config = {"config_groups": groups}
    found = {
        layer: config_group(config, layer)["weights"]
        for layer in ("a.attn.q", "a.mlp.down", "a.mlp.up", "b.a.mlp.up")
    }
    assert found == {"a.attn.q": 0, "a.mlp.down": 1, "a.mlp.up": 2, "b.a.mlp.up": 1}


def test_bytes_of_a_layer_with_zero_points() -> None:
    """Two rows of one group, written down by hand: codes along the row, zero points down it."""
    values = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    grid = Grid(torch.tensor([[0.5], [2.0]]), torch.tensor([[3], [12]], dtype=torch.uint8))
    tensors = dict(
        layer_tensors("a.b", StoredMatrix(Codes(values, grid), parse_scheme("int4-g32-asym")))
    )
    low, high = 0x76543210, 0xFEDCBA98 - 2**32
    assert tensors["a.b.weight_packed"].tolist() == [[low, high] * 2] * 2
    assert tensors["a.b.weight_packed"].dtype == torch.int32
    assert tensors["a.b.weight_zero_point"].tolist() == [[0xC3]]
    assert tensors["a.b.weight_scale"].tolist() == [[0.5], [2.0]]
    assert tensors["a.b.weight_shape"].tolist() == [2, 32]
    assert len(tensors) == 4


def test_bytes_of_8_bit_layers() -> None:
    values = torch.tensor([[-127, 0, 1, 127], [2, 3, 4, 5]], dtype=torch.int8)
    grid = Grid(torch.tensor([[0.5], [2.0]]))
    packed = dict(layer_tensors("a", StoredMatrix(Codes(values, grid), parse_scheme("int8"))))
    assert packed["a.weight_packed"].view(torch.uint8).tolist() == [
        [1, 128, 129, 255],
        [130, 131, 132, 133],
    ]
    assert packed.keys() == {"a.weight_packed", "a.weight_scale", "a.weight_shape"}
    plain = dict(layer_tensors("a", StoredMatrix(Codes(values, grid), parse_scheme("w8a8-int8"))))
    assert torch.equal(plain["a.weight"], values)
    assert plain.keys() == {"a.weight", "a.weight_scale"}
    one = StoredMatrix(
        Codes(values.to(torch.float8_e4m3fn), Grid(torch.ones(1, 1))), parse_scheme("fp8-tensor")
    )
    assert dict(layer_tensors("a", one))["a.weight_scale"].shape == (1,)


def test_what_the_config_says_of_each_scheme() -> None:
    def said(name: str, part: str) -> dict[str, Any]:
        return scheme_config(parse_scheme(name))[part]

    assert said("int4-g64-asym", "weights") == {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "dynamic": False,
        "strategy": "group",
        "group_size": 64,
    }
    assert said("int8", "input_activations") is None
    inputs = said("w8a8-int8", "input_activations")
    assert (inputs["type"], inputs["strategy"], inputs["dynamic"]) == ("int", "token", True)
    assert said("fp8-block", "weights")["block_structure"] == [128, 128]
    assert said("fp8-block", "input_activations")["group_size"] == 128
    formats = [scheme_config(parse_scheme(name))["format"] for name in SCHEMES]
    assert formats == ["pack-quantized"] * 3 + ["int-quantized"] + ["float-quantized"] * 3


@pytest.mark.usefixtures("wide")
def test_layers_left_alone_are_named_and_mixtures_go_by_name(tmp_path: Path) -> None:
    model, matrices = quantized(tmp_path / "in", "llama-tied", "int8")
    del matrices["layers.0.mlp.down.weight"]
    save_quantized(model, tmp_path / "one", source=tmp_path / "in", matrices=matrices)
    one = json.loads((tmp_path / "one/config.json").read_text())["quantization_config"]
    assert one["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert one["config_groups"]["group_0"]["targets"] == ["Linear"]
    stored = load_file(tmp_path / "one/model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in stored
    assert "model.layers.0.self_attn.k_proj.weight_packed" in stored

    model, matrices = quantized(tmp_path / "in2", "llama-tied", "int8", "fp8")
    save_quantized(model, tmp_path / "two", source=tmp_path / "in2", matrices=matrices)
    two = json.loads((tmp_path / "two/config.json").read_text())["quantization_config"]
    assert two["format"] == "mixed-precision"
    attention = "model.layers.0.self_attn"
    assert two["config_groups"]["group_0"]["targets"][:3] == [
        f"{attention}.{word}_proj" for word in "qkv"
    ]
    assert_same(expand(model, matrices), load_model(tmp_path / "two", dtype="fp32", device="cpu"))


@pytest.mark.usefixtures("wide")
def test_sparsity_is_noted_and_loads(tmp_path: Path) -> None:
    model, matrices = quantized(tmp_path / "in", "llama-tied", "fp8")
    note, source = SparsityPattern("2:4", 0.5), tmp_path / "in"
    save_quantized(model, tmp_path / "fp8", source=source, matrices=matrices, sparsity=note)
    config = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert config["sparsity_config"]["sparsity_structure"] == "2:4"
    save_quantized(model, tmp_path / "plain", source=source, matrices={}, sparsity=note)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config
    assert config["sparsity_config"]["global_sparsity"] == 0.5
    for folder in ("plain", "fp8"):
        load_model(tmp_path / folder, dtype="fp32", device="cpu")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """Blocks of 128 rows do not fit the pieces of a fused weight; names must be the model's."""
    tiny_models.save_model("llama-mha", tmp_path / "in")
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    scheme = parse_scheme("fp8-block")
    weight = torch.ones(256, 128)
    matrix = StoredMatrix(encode(weight, find_grid(weight, scheme), scheme), scheme)
    with pytest.raises(UnsupportedError, match="cannot be cut out of blocks of 128"):
        save_quantized(
            model,
            tmp_path / "out",
            source=tmp_path / "in",
            matrices={"layers.0.attn.qkv.weight": matrix},
        )
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.q\.weight"):
        save_quantized(
            model,
            tmp_path / "out",
            source=tmp_path / "in",
            matrices={"layers.0.attn.q.weight": matrix},
        )
    assert not (tmp_path / "out").exists()
