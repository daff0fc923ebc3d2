"""GGUF files of every family give the logits of the transformers model they were written from, and
of transformers' own GGUF reader where it has one, so that the writer in these tests is held to the
format too.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from gguf_files import ARCHITECTURES, write_gguf
from test_families import PROMPT, all_logits
from tiny_models import MODELS, make_model

from ridgeline.models.families import FAMILIES
from ridgeline.quantization import load_model

# The format has no field for these: sliding windows of Llama-like files, experts that are not
# renormalized, Qwen's upper windows, biases of the output projection beside Qwen3's.
WRITABLE = [
    "llama-mha",
    "llama-mqa-bias",
    "llama-wide-heads",
    "llama-tied",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-yarn",
    "mistral-full",
    "mixtral",
    "smollm3",
    "granite",
    "granite-bias",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-longrope-partial",
]
READ_BY_TRANSFORMERS = {
    "llama-mha",
    "llama-wide-heads",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
}


def test_every_family_with_gguf_files_is_written() -> None:
    tested = {MODELS[name][0].removesuffix("Text") for name in WRITABLE}
    known = {family.architectures[0] for family in FAMILIES if family.gguf is not None}
    assert known <= {f"{name}ForCausalLM" for name in tested & set(ARCHITECTURES)}


@pytest.mark.parametrize("name", WRITABLE)
def test_same_logits_as_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    peer = make_model(name)
    if name in ("gemma2", "gemma3"):  # the format implies head_dim ** -0.5 for all but the 27B
        for layer in peer.model.layers:
            layer.self_attn.scaling = peer.config.head_dim**-0.5
    write_gguf(peer, tmp_path / "model.gguf")
    ours = load_model(tmp_path / "model.gguf", dtype="fp32", device="cpu")
    with torch.inference_mode():
        expected = peer(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(ours, PROMPT), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(READ_BY_TRANSFORMERS))
def test_same_weights_as_transformers_reads(name: str, tmp_path: Path) -> None:
    peer = make_model(name)
    write_gguf(peer, tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    theirs = read.state_dict()
    for key, tensor in peer.state_dict().items():
        torch.testing.assert_close(
            theirs[key].float(), tensor, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_blocks_are_what_the_package_decodes(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    peer = make_model("phi3-longrope-partial")  # hidden size 64: whole blocks
    write_gguf(peer, tmp_path / "model.gguf", quantized=kind)
    ours = load_model(tmp_path / "model.gguf", dtype="fp32", device="cpu")
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.dim() == 2 and parameter.shape[-1] % 32 == 0:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
        expected = peer(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(ours, PROMPT), expected, atol=1e-4, rtol=1e-4)
