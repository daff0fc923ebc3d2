"""Quantized checkpoints that are spoiled or of a kind that is not read: one line each, through the
loader, before anything is run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_files as files
import tiny_models
import torch
from command_line import edit_json, generate, refused
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.errors import CheckpointError, ConfigError, RidgelineError, UnsupportedError
from ridgeline.quantization import load_model

Tensors = dict[str, Tensor]
UP = "model.layers.0.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
NAN = torch.nan


WHOLE: dict[str, tuple[files.Writer, dict[str, Any]]] = {
    "awq": (files.awq_writer(32), {"quant_method": "awq", "bits": 4, "zero_point": True}),
    "gptq": (files.gptq_writer(32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "fp8": (
        files.fp8_writer((128, 128), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "packed": (files.packed_writer(32), files.compressed_config("pack-quantized", INT4)),
    "nvfp4": (
        files.nvfp4_writer("weight_packed", "weight_global_scale", True),
        files.compressed_config("nvfp4-pack-quantized", {}),
    ),
    "mxfp4": (files.mxfp4_writer, files.compressed_config("mxfp4-pack-quantized", {})),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each kind with which nothing is wrong."""
    place = tmp_path_factory.mktemp("wholes")
    small = tiny_models.SMALL | {"hidden_size": 64, "intermediate_size": 192}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "SMALL", small | {"num_hidden_layers": 1})
        for kind, (writer, config) in WHOLE.items():
            files.write_checkpoint(place / kind, "llama-mha", writer, config)
    return place


@pytest.fixture
def spoiled(wholes: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy with some tensors or fields of its quantization_config changed; `...` is: without."""

    def spoil(kind: str, tensors: dict[str, Any] | None = None, **fields: Any) -> Path:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(wholes / kind, folder)
        stored = load_file(folder / "model.safetensors")
        for last, change in (tensors or {}).items():
            name = f"{UP}.{last}"
            if change is ...:
                del stored[name]
            else:
                stored[name] = change(stored[name]).contiguous()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        config = {k: v for k, v in (config | fields).items() if v is not ...}
        edit_json(folder / "config.json", quantization_config=config)
        return folder

    return spoil


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    return change


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def group(**changes: Any) -> dict[str, Any]:
    config = files.compressed_config("pack-quantized", INT4)["config_groups"]["group_0"]
    return {"group_0": config | changes}


TENSORS = [
    ("awq", {"scales": ...}, f"{UP} has no scales"),
    ("awq", {"qzeros": ...}, f"{UP} has no qzeros"),
    ("awq", {"scales": first(NAN)}, f"{UP} has 1 scales that are NaN"),
    ("awq", {"scales": cut}, "has qzeros of shape"),
    ("awq", {"qweight": lambda t: t[:, :-1]}, "has scales of shape [2, 192]; expected [2, 184]"),
    ("awq", {"qweight": lambda t: t[:-1]}, "2 groups in scales for 63 columns"),
    ("awq", {"qweight": lambda t: t.float()}, "has qweight in fp32; expected int32"),
    ("awq", {"qweight": lambda t: t.flatten()}, "expected rows and columns"),
    ("gptq", {"g_idx": first(7)}, "has g_idx outside its 2 groups"),
    ("gptq", {"g_idx": cut}, "has g_idx of shape [63]; expected [64]"),
    ("gptq", {"scales": first(float("inf"))}, "NaN or infinite"),
    ("gptq", {"qzeros": cut}, "has qzeros of shape"),
    ("fp8", {"weight_scale_inv": ...}, f"{UP} has no weight_scale"),
    ("fp8", {"weight_scale_inv": first(NAN)}, "NaN"),
    ("fp8", {"weight_scale_inv": lambda t: t.repeat(3, 1)}, "weight_scale_inv of shape [6, 1]"),
    ("fp8", {"weight": lambda t: t.to(torch.float8_e5m2)}, "only e4m3 is supported"),
    ("packed", {"weight_shape": ...}, "has no weight_shape"),
    ("packed", {"weight_shape": lambda t: t + 8}, "has weight_packed of shape [192, 8]"),
    ("packed", {"weight_shape": lambda t: -t}, "weight_shape holds [-192, -64]"),
    ("packed", {"weight_shape": lambda t: t[:1]}, "expected two numbers"),
    ("packed", {"weight_zero_point": ...}, "has no weight_zero_point"),
    ("packed", {"weight_zero_point": cut}, "has weight_zero_point of shape"),
    ("packed", {"weight_scale": first(NAN)}, "NaN"),
    ("packed", {"weight_scale": lambda t: t.repeat(1, 3)}, "6 groups in weight_scale"),
    ("nvfp4", {"weight_global_scale": ...}, "has no weight_global_scale"),
    ("nvfp4", {"weight_global_scale": lambda t: t * 0}, "NaN or infinite"),
    ("nvfp4", {"weight_scale": cut}, "has weight_scale of shape"),
    ("nvfp4", {"weight_packed": lambda t: t[:, :-1]}, "not a multiple of the group size 16"),
    ("mxfp4", {"weight_scale": first(255)}, "NaN"),
    ("mxfp4", {"weight_scale": ...}, "has no weight_scale"),
]


@pytest.mark.parametrize(("kind", "tensors", "words"), TENSORS)
def test_spoiled_tensors(
    kind: str, tensors: dict[str, Any], words: str, spoiled: Callable[..., Path]
) -> None:
    check(spoiled(kind, tensors), CheckpointError, words)


FIELDS = [
    ("awq", {"quant_method": "bitsandbytes"}, UnsupportedError, "is quantized by 'bitsandbytes'"),
    ("awq", {"quant_method": "gptg"}, UnsupportedError, "did you mean 'gptq'"),
    ("awq", {"quant_method": ...}, UnsupportedError, "quantized by 'None'"),
    ("awq", {"quant_method": ["awq"]}, UnsupportedError, "supported are compressed-tensors, awq"),
    ("awq", {"version": "gemv"}, UnsupportedError, "version 'gemv' is not supported; only gemm is"),
    ("awq", {"bits": 3}, CheckpointError, "bits is 3; it can be 4"),
    ("gptq", {"bits": 3}, CheckpointError, "bits is 3; it can be 2, 4, 8"),
    ("gptq", {"bits": True}, CheckpointError, "bits is True"),
    ("gptq", {"checkpoint_format": "marlin"}, UnsupportedError, "'marlin' is not supported"),
    ("fp8", {"weight_block_size": [64, 64]}, UnsupportedError, "[128, 128] are"),
    ("packed", {"config_groups": ...}, CheckpointError, "has no config_groups"),
    ("packed", {"config_groups": {"a": 1}}, CheckpointError, "lists no targets"),
    (
        "packed",
        {"config_groups": group(targets=["re:lm_head"])},
        CheckpointError,
        "no config group",
    ),
    ("packed", {"config_groups": group(targets=["re:("])}, CheckpointError, "pattern 're:('"),
    (
        "packed",
        {"config_groups": group(weights=None)},
        CheckpointError,
        "does not describe weights",
    ),
    ("packed", {"config_groups": group(weights=INT4 | {"num_bits": 3})}, CheckpointError, "3 bits"),
]


@pytest.mark.parametrize(("kind", "fields", "error", "words"), FIELDS)
def test_configs_that_are_not_read(
    kind: str,
    fields: dict[str, Any],
    error: type[RidgelineError],
    words: str,
    spoiled: Callable[..., Path],
) -> None:
    check(spoiled(kind, **fields), error, words)


def check(folder: Path, error: type[RidgelineError], words: str) -> None:
    with pytest.raises(error) as caught:
        load_model(folder, dtype="fp32", device="cpu")
    message = str(caught.value)
    assert words in message, message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("kind", sorted(WHOLE))
def test_nothing_was_wrong_before(kind: str, spoiled: Callable[..., Path]) -> None:
    load_model(spoiled(kind), dtype="fp32", device="cpu")


def test_blocks_of_another_size(spoiled: Callable[..., Path]) -> None:
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}
    config = files.compressed_config("float-quantized", blocks)
    folder = spoiled("fp8", **config, weight_block_size=...)
    check(folder, CheckpointError, "has blocks of [64, 64]; only 128 x 128 are supported")


def test_codes_of_another_size_than_the_models(spoiled: Callable[..., Path]) -> None:
    fewer = {"qweight": lambda t: t[:, :-1], "qzeros": lambda t: t[:, :-1]}
    folder = spoiled("awq", fewer | {"scales": lambda t: t[:, :-8]})
    check(folder, CheckpointError, f"wrong shape: {UP}.weight [184, 64] instead of [192, 64]")


def test_a_config_that_is_no_object(spoiled: Callable[..., Path]) -> None:
    folder = spoiled("awq")
    edit_json(folder / "config.json", quantization_config=[1])
    check(folder, ConfigError, "quantization_config is not an object")


def test_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"quant_method": "bitsandbytes"}
    edit_json(folder / "config.json", quantization_config=config)
    refused(capsys, UnsupportedError, "is quantized by 'bitsandbytes'", *generate(folder))
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.qweight"] = tensors.pop(f"{UP}.weight").to(torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(capsys, CheckpointError, f"{UP} has no scales", *generate(folder))
