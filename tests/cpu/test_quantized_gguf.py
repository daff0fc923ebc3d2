"""GGUF blocks kept as codes: Q4_0 is int4-g32 exactly, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from gguf_files import write_gguf
from test_quantized_reading import whole_matrices

from ridgeline.errors import CheckpointError
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.quantization import load_model
from ridgeline.quantization.files import StoredMatrix, decoded_matrix, kept_schemes, read_quantized
from ridgeline.quantization.files.gguf import q4_0_matrix

TYPES = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_models.SMALL | {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(tiny_models, "SMALL", small | {"num_hidden_layers": 1})


def test_codes_are_the_blocks_own() -> None:
    """Against the gguf package, for random bytes: every code and many scales."""
    raw = np.random.default_rng(0).integers(0, 256, (7, 3 * 18), dtype=np.uint8)
    raw.reshape(7, 3, 18)[..., 1] &= 0x3F  # the scale's exponent: no NaN
    matrix = q4_0_matrix(torch.from_numpy(raw.reshape(-1)), 7)
    assert matrix.scheme.name == "int4-g32"
    assert matrix.codes.grid.scale.shape == (7, 3)
    expected = torch.from_numpy(gguf.dequantize(raw, TYPES.Q4_0))
    assert torch.equal(decoded_matrix(matrix), expected)
    assert len(matrix.codes.values.unique()) == 16


@pytest.mark.parametrize("name", ["llama-mha", "qwen2"])
def test_a_q4_0_file_keeps_its_codes(name: str, tmp_path: Path) -> None:
    """llama's q and k lie in another order in the file, and come in ours."""
    write_gguf(tiny_models.make_model(name), tmp_path / "model.gguf", TYPES.Q4_0)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    model = load_model(tmp_path / "model.gguf", dtype="fp32", device="cpu")
    parameters = dict(model.named_parameters())
    fused = dict(whole_matrices(checkpoint, describe(checkpoint), model))
    words = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    assert fused.keys() == {f"layers.0.{word}" for word in words}
    for key, matrix in fused.items():
        assert torch.equal(decoded_matrix(matrix), parameters[f"{key}.weight"]), key


@pytest.mark.parametrize("kind", [TYPES.Q4_1, TYPES.Q8_0, TYPES.Q5_0])
def test_other_types_become_weights(kind: TYPES, tmp_path: Path) -> None:
    write_gguf(tiny_models.make_model("llama-mha"), tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    found = dict(read_quantized(checkpoint))
    assert found.keys() == checkpoint.tensors.keys()
    assert not any(isinstance(one, StoredMatrix) for one in found.values())
    assert not kept_schemes(checkpoint, describe(checkpoint))


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_models.make_model("llama-mha"), path, TYPES.Q4_0)
    checkpoint = open_checkpoint(path)
    name = "blk.0.ffn_up.weight"
    data = bytearray(path.read_bytes())
    start = checkpoint.tensors[name].offset
    data[start : start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight' has scales that are NaN"):
        list(read_quantized(open_checkpoint(path), [name]))
