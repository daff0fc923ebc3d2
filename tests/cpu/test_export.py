"""Saved models are what was loaded: for us, and for transformers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from gguf_files import write_gguf
from test_families import PROMPT, all_logits
from tiny_models import MODELS, make_model
from tiny_models import save_model as save_peer
from tiny_tokenizers import sentencepiece_metadata

import ridgeline
from ridgeline.data import Tokenizer
from ridgeline.errors import CheckpointError, OutputError
from ridgeline.models import build_model, fill_random
from ridgeline.models.checkpoint import resolve_model, save_safetensors
from ridgeline.models.families import describe_hf
from ridgeline.models.weights import checkpoint_tensors
from ridgeline.quantization import load_model, save_model


@pytest.mark.sweep(keep=10)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_save_gives_back_every_tensor(name: str, tmp_path: Path) -> None:
    peer = save_peer(name, tmp_path / "in")
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    save_model(model, tmp_path / "out", source=tmp_path / "in", max_shard_bytes=40_000)
    again = load_model(tmp_path / "out", dtype="fp32", device="cpu")
    assert again.config == model.config
    for (key, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key, tensor in peer.state_dict().items():
        assert torch.equal(read.state_dict()[key], tensor), key


def test_others_may_read_what_they_may_read_of_the_users_files(tmp_path: Path) -> None:
    """A service under another account loads it: weights are as readable as the files beside."""
    save_peer("llama-mha", tmp_path / "in")
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    save_model(model, tmp_path / "out", source=tmp_path / "in")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_gguf_becomes_a_folder_that_transformers_runs(tmp_path: Path) -> None:
    peer = make_model("qwen3")
    write_gguf(peer, tmp_path / "model.gguf")
    model = load_model(tmp_path / "model.gguf", dtype="fp32", device="cpu")
    save_model(model, tmp_path / "out", source=tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        theirs = read(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(model, PROMPT), theirs, atol=1e-4, rtol=1e-4)


def test_the_demo_becomes_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    path = resolve_model("demo")
    tokenizer = Tokenizer.load(path)
    model = load_model(path, dtype="bf16", device="cpu")
    save_model(model, tmp_path / "demo", source="demo", extra_files=tokenizer.files())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "demo")
    ours = Tokenizer.load(tmp_path / "demo")
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    for text in ("a  1\n\n12", "Grüße, 世界 🙂", "<|im_start|>user"):
        assert theirs(text)["input_ids"] == ours.encode(text) == tokenizer.encode(text)
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True)
    assert list(rendered["input_ids"]) == ours.chat(chat) == tokenizer.chat(chat)
    assert ours.eos_ids == tokenizer.eos_ids
    config = json.loads((tmp_path / "demo" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_a_tokenizer_with_bos_keeps_it(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.from_gguf(metadata)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    text = "def function(x): return x"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert theirs(text)["input_ids"] == Tokenizer.load(tmp_path).encode(text) == ids


def test_misfits_are_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    save_peer("llama-mha", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 4, "intermediate_size": 96})
    )
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "in", device="cpu")
    message = str(caught.value)
    assert "missing" in message
    assert "model.layers.3.input_layernorm.weight" in message
    assert "wrong shape" in message
    assert "[80, 48] instead of [96, 48]" in message


def run_program(program: str, *arguments: str) -> str:
    """What a Python process of its own printed."""
    root = Path(ridgeline.__file__).parent.parent
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """In a process that may write no more than 64 kB to a file: the kernel itself refuses."""
    save_peer("llama-mha", tmp_path / "in")
    model = load_model(tmp_path / "in", dtype="fp32", device="cpu")
    child = os.fork()
    if not child:
        code = 70
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
            save_model(model, tmp_path / "out", source=tmp_path / "in")
        except OutputError as error:
            code = 0 if "out" in str(error) else 71
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    save_peer("llama-mha", tmp_path / "in")
    model = load_model(tmp_path / "in", device="cpu")
    with pytest.raises(OutputError, match="not empty"):
        save_model(model, tmp_path / "in", source=tmp_path / "in")


@pytest.mark.slow
def test_loading_takes_little_beyond_the_model(tmp_path: Path) -> None:
    """Peak memory of a process that loads six shards of 32 MiB: the model, one shard, and 10%."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
    }
    description = describe_hf(values)
    model = fill_random(build_model(description.config, torch.bfloat16, "cpu"))
    shard = 32 << 20
    save_safetensors(
        tmp_path / "in", checkpoint_tensors(model, description), values, max_shard_bytes=shard
    )
    assert len(list((tmp_path / "in").glob("*.safetensors"))) >= 6
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from ridgeline.quantization import load_model\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "load_model(Path(sys.argv[1]), dtype='fp32', device='cpu')\n"
        "before = peak()\n"
        "model = load_model(Path(sys.argv[2]), dtype='fp32', device='cpu')\n"
        "print(peak() - before - sum(p.nbytes for p in model.parameters()))\n"
    )
    save_peer("llama-mha", tmp_path / "tiny")  # loaded first: what importing and starting takes
    beyond = run_program(program, str(tmp_path / "tiny"), str(tmp_path / "in"))
    assert int(beyond) < 1.1 * shard
