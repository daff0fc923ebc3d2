"""Checkpoints of other quantizers: every format loads, its weights are those that were written, and
codes are kept where there is a scheme for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_files as files
import tiny_models
import torch
import transformers
from safetensors.torch import save_file
from test_families import PROMPT, all_logits

from ridgeline.models import Transformer
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint
from ridgeline.models.families import Description, describe
from ridgeline.models.weights import stored_parts
from ridgeline.quantization import load_model, save_model
from ridgeline.quantization.files import (
    StoredMatrix,
    cut,
    decoded,
    decoded_matrix,
    is_quantized,
    join,
    kept_schemes,
    model_weights,
    open_quantized,
    read_quantized,
)
from ridgeline.quantization.files.fuse import Whole
from ridgeline.quantization.files.matrix import joined_scheme
from ridgeline.quantization.scheme import encode, find_grid, parse_scheme

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = files.compressed_config("nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group"})
PACKED = files.compressed_config("pack-quantized", {"num_bits": 4, "symmetric": False})
MXFP4 = files.compressed_config("mxfp4-pack-quantized", {**FP4, "strategy": "group"})

# What is written, its config, and the scheme its codes are kept in (None: plain weights).
CASES: dict[str, tuple[files.Writer, dict[str, Any], str | None]] = {
    "awq": (files.awq_writer(32), AWQ, "int4-g32-asym"),
    "awq-g64": (files.awq_writer(64), AWQ | {"group_size": 64}, "int4-g64-asym"),
    "gptq": (files.gptq_writer(32), GPTQ, "int4-g32-asym"),
    "gptq-v2": (
        files.gptq_writer(64, offset=0),
        GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 64},
        "int4-g64-asym",
    ),
    "gptq-sym": (files.gptq_writer(32, symmetric=True), GPTQ | {"sym": True}, "int4-g32"),
    "gptq-sym-says-v1-is-v2": (
        files.gptq_writer(32, symmetric=True, offset=0),
        GPTQ | {"sym": True},
        "int4-g32",
    ),
    "gptq-desc-act": (files.gptq_writer(32, sort=True), GPTQ | {"desc_act": True}, None),
    "gptq-g16": (files.gptq_writer(16), GPTQ | {"group_size": 16}, None),
    "gptq-8-bit": (files.gptq_writer(64, bits=8), GPTQ | {"bits": 8}, None),
    "packed": (files.packed_writer(64), PACKED, "int4-g64-asym"),
    "packed-sorted": (files.packed_writer(32, sort=True), PACKED, None),
    "fp8-block-cut-short": (files.fp8_writer((128, 128), "weight_scale_inv"), DEEPSEEK, None),
    "fp8-rows": (
        files.fp8_writer((1, 10**6), "weight_scale"),
        {"quant_method": "fbgemm_fp8"},
        "fp8",
    ),
    "fp8-tensor-static": (
        files.fp8_writer(None, "weight_scale", fixed_inputs=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "fp8-tensor",
    ),
    "nvfp4": (files.nvfp4_writer("weight_packed", "weight_global_scale", True), NVFP4, None),
    "nvfp4-modelopt": (
        files.nvfp4_writer("weight", "weight_scale_2", False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        None,
    ),
    "mxfp4": (files.mxfp4_writer, MXFP4, None),
}


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that groups of 64 divide and blocks of 128 do not."""
    small = tiny_models.SMALL | {"hidden_size": 64, "intermediate_size": 192}
    monkeypatch.setattr(tiny_models, "SMALL", small | {"num_hidden_layers": 1})


@pytest.mark.parametrize("case", sorted(CASES))
def test_weights_are_what_was_written(case: str, tmp_path: Path) -> None:
    writer, config, scheme = CASES[case]
    name = "qwen2" if case.startswith("gptq") else "llama-mqa-bias"
    peer = files.write_checkpoint(tmp_path, name, writer, config)
    checkpoint = open_checkpoint(tmp_path)
    state = peer.state_dict()
    found = dict(read_quantized(checkpoint))
    assert found.keys() == state.keys()
    kept = {key: one for key, one in found.items() if isinstance(one, StoredMatrix)}
    assert {one.scheme.name for one in kept.values()} == ({scheme} if scheme else set())
    assert len(kept) in (0, 7)
    for key, one in found.items():
        weight = decoded_matrix(one) if isinstance(one, StoredMatrix) else one.float()
        torch.testing.assert_close(weight, state[key], atol=2e-7, rtol=1e-6, msg=key)
    model = load_model(tmp_path, dtype="fp32", device="cpu")
    with torch.inference_mode():
        theirs = peer(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(model, PROMPT), theirs, atol=1e-4, rtol=1e-4)


def test_whole_blocks_are_kept_and_transformers_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's form; transformers expands it on a CPU, to the dtype of the model."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    monkeypatch.setattr(tiny_models, "SMALL", tiny_models.SMALL | sizes)
    writer = files.fp8_writer((128, 128), "weight_scale_inv")
    files.write_checkpoint(tmp_path, "llama-tied", writer, DEEPSEEK)
    kinds = {
        one.scheme.name
        for _, one in read_quantized(open_checkpoint(tmp_path))
        if isinstance(one, StoredMatrix)
    }
    assert kinds == {"fp8-block"}
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = load_model(tmp_path, dtype="fp32", device="cpu")
    with torch.inference_mode():
        theirs = peer(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(model, PROMPT), theirs, atol=1e-4, rtol=1e-4)


def whole_matrices(checkpoint: Checkpoint, description: Description, model: Transformer) -> Any:
    """All projections whose codes can be kept, by name."""
    part_of = stored_parts(model, decoded(checkpoint), description)
    kept = kept_schemes(checkpoint, description).keys()
    return [w for w in model_weights(checkpoint, part_of, kept) if isinstance(w, Whole)]


@pytest.mark.parametrize("case", ["awq", "gptq", "gptq-sym", "fp8-rows", "fp8-tensor-static"])
def test_pieces_become_the_models_own_matrices(case: str, tmp_path: Path) -> None:
    writer, config, _ = CASES[case]
    files.write_checkpoint(tmp_path, "llama-mqa-bias", writer, config)
    model = load_model(tmp_path, dtype="fp32", device="cpu")
    parameters = dict(model.named_parameters())
    checkpoint = open_checkpoint(tmp_path)
    description = describe(checkpoint)
    fused = dict(whole_matrices(checkpoint, description, model))
    assert {k: one.scheme for k, one in fused.items()} == kept_schemes(checkpoint, description)
    words = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    assert fused.keys() == {f"layers.0.{word}" for word in words}
    for name, matrix in fused.items():
        assert torch.equal(decoded_matrix(matrix), parameters[f"{name}.weight"]), name


def test_joined_and_cut_rows_stand_for_the_same_weights() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(rows, 128) for rows in (128, 384)]
    for names, joined in {
        ("int8", "int8"): "int8",
        ("int4-g32", "int4-g32-asym"): "int4-g32-asym",
        ("fp8-tensor", "fp8-tensor"): "fp8",
        ("fp8-block", "fp8-block"): "fp8-block",
        ("int4-g32", "int4-g64"): None,
        ("int4-g32-asym", "int8"): None,
    }.items():
        schemes = [parse_scheme(name) for name in names]
        pieces = [
            StoredMatrix(encode(weight, find_grid(weight, scheme), scheme), scheme)
            for weight, scheme in zip(weights, schemes, strict=True)
        ]
        whole = join(pieces)
        assert (whole.scheme.name if whole else None) == joined
        assert joined_scheme(schemes) == (whole.scheme if whole else None)
        if whole is None:
            continue
        stacked = torch.cat([decoded_matrix(piece) for piece in pieces])
        assert torch.equal(decoded_matrix(whole), stacked)
        for rows in (slice(0, 128), slice(128, 512)):
            assert torch.equal(decoded_matrix(cut(whole, rows)), stacked[rows])


def test_what_is_not_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, config, _ = CASES["fp8-tensor-static"]
    files.write_checkpoint(tmp_path / "static", "llama-mha", writer, config)
    load_model(tmp_path / "static", dtype="fp32", device="cpu")
    assert "7 fixed input scales are ignored" in caplog.text
    writer, config, _ = CASES["gptq-desc-act"]
    files.write_checkpoint(tmp_path / "sorted", "llama-mha", writer, config)
    load_model(tmp_path / "sorted", dtype="fp32", device="cpu")
    assert "7 matrices are expanded to plain weights: their columns are sorted" in caplog.text


def test_saved_again_it_is_plain(tmp_path: Path) -> None:
    writer, config, _ = CASES["awq"]
    files.write_checkpoint(tmp_path / "in", "llama-mha", writer, config)
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    save_model(model, tmp_path / "out", source=tmp_path / "in")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert is_quantized(open_checkpoint(tmp_path / "in"))
    assert not is_quantized(open_checkpoint(tmp_path / "out"))
    again = load_model(tmp_path / "out", dtype="fp32", device="cpu")
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_older_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    writer, config, _ = CASES["nvfp4-modelopt"]
    files.write_checkpoint(tmp_path, "llama-mha", writer, config)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    opened = open_quantized(open_checkpoint(tmp_path))
    assert opened is not None
    assert len(opened.layouts) == 7


# The package's own names of schemes, and the scheme whose codes we keep.
PRESETS = {
    "W4A16": "int4-g128",
    "W4A16_ASYM": "int4-g128-asym",
    "W8A16": None,  # 8 bits in groups
    "W4A8": None,  # the same, with 4 bits in a byte
    "W8A8": "w8a8-int8",
    "FP8": "fp8-tensor",
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8-block",
    "NVFP4A16": None,
    "MXFP4A16": None,
}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_the_compressed_tensors_package_writes(preset: str, tmp_path: Path) -> None:
    """Codes and scales by the package, and the weights that it makes of them."""
    package = pytest.importorskip("compressed_tensors")
    scheme = package.quantization.preset_name_to_scheme(preset, ["Linear"])
    form = package.compressors.format.infer_module_format(torch.nn.Linear, scheme)
    compressor = package.compressors.BaseCompressor.get_value_from_registry(form.value)
    torch.manual_seed(0)
    weight = torch.randn(256, 384)
    stored = compressor.compress(package_grid(weight, scheme.weights), scheme)
    theirs = compressor.decompress(stored, scheme)["weight"]
    assert 0 < (theirs - weight).abs().max() < 2  # it is the weight, coarser

    layer = "model.layers.0.mlp.down_proj"
    tensors = {f"{layer}.{key}": tensor.contiguous() for key, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = {
        "quant_method": "compressed-tensors",
        "format": form.value,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    ((name, ours),) = read_quantized(open_checkpoint(tmp_path))
    assert name == f"{layer}.weight"
    assert (ours.scheme.name if isinstance(ours, StoredMatrix) else None) == PRESETS[preset]
    ours = decoded_matrix(ours) if isinstance(ours, StoredMatrix) else ours
    close = (
        2**-7 if theirs.dtype == torch.bfloat16 else 1e-6
    )  # its nvfp4 scales are divided in bf16
    torch.testing.assert_close(ours, theirs.float(), atol=0, rtol=close)


def package_grid(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """A weight with scales and zero points as the package would choose them."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    sizes = {
        "channel": (1, weight.shape[1]),
        "tensor": tuple(weight.shape),
        "block": args.block_structure,
    }
    rows, columns = sizes.get(args.strategy, (1, args.group_size))
    parts = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = parts.amin((1, 3)), parts.amax((1, 3))
    whole = generate_gparam(low.min(), high.max()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, whole)
    scale = scale.view(1) if args.strategy == "tensor" else scale
    found = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return found if whole is None else found | {"weight_global_scale": whole}
