"""`ridgeline train --lora` as a user calls it: adapters alone are learned and saved, PEFT loads
them, a run that was stopped goes on bit for bit, and merging is refused where it changes the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import make_folder, refused
from safetensors.torch import load_file
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.errors import QualityError, UsageError
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.quantization import load_model
from ridgeline.quantization.files import is_quantized
from ridgeline.training import merge as merging
from ridgeline.training.config_file import load_config
from ridgeline.training.watching.metrics import read_metrics

Capture = pytest.CaptureFixture[str]
STEPS = 6
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 fit
LORA = ("--lora", "4", "--lora-alpha", "16", "--precision", "bf16")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT[:60_000])
    return path


def words(model: Path, text: Path, out: Path, *more: str, steps: int = STEPS) -> list[str]:
    paths = [str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    usual = ["--sequence-length", "32", "--batch", "4", "--micro-batch", "2", "--lr", "2e-2"]
    return ["train", *paths, *usual, "--steps", str(steps), "--warmup", "2", *more]


def called(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture(scope="module")
def run(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    more = ("--schedule", "constant", "--save-every", "3")
    assert main([*words(model, text, out, *LORA, *more), "--json"]) == 0
    return out


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


def test_adapters_alone_are_learned_and_saved(run: Path, checkpoint: Path, model: Path) -> None:
    held_out = [row["held_out_loss"] for row in read_metrics(run) if "held_out_loss" in row]
    assert held_out[-1] < held_out[0] - 0.1
    assert not (checkpoint / "model.safetensors").exists()
    values = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (values["peft_type"], values["r"], values["lora_alpha"]) == ("LORA", 4, 16.0)
    assert values["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert values["base_model_name_or_path"] == str(model)
    tensors = load_file(checkpoint / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert tensors[name].dtype == torch.bfloat16
    assert tensors[name].abs().max() > 0
    assert load_config(run).lora.rank == 4
    state = load_file(checkpoint / "training" / "optimizer.safetensors")
    assert all((".down" in key) or (".up." in key) for key in state)


def test_peft_loads_a_checkpoint(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    """And computes with it what the merged model computes."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    adapted = peft.PeftModel.from_pretrained(base, checkpoint).eval()
    adapted = adapted.float()
    merging.merge_run(checkpoint, tmp_path / "merged", device="cpu")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float()
    ids = torch.arange(40, 60)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-3, rtol=1e-3)


def test_a_run_goes_on_bit_for_bit(
    model: Path, text: Path, run: Path, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "parts"
    more = (*LORA, "--schedule", "constant", "--save-every", "3")
    called(capsys, *words(model, text, out, *more, steps=3))
    called(capsys, "train", "--out", str(out), "--resume", "--steps", str(STEPS))
    for name in ("adapter_model.safetensors", "training/optimizer.safetensors"):
        again = out / "checkpoints" / checkpoint.name / name
        assert again.read_bytes() == (checkpoint / name).read_bytes(), name


def test_merging(run: Path, model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "merged"
    document = called(capsys, "train", "--merge", str(run), "--out", str(out), "--device", "cpu")
    assert document["dtype"] == "fp32"  # as the base
    assert document["difference"] < 1e-4 < document["effect"]
    before, after = (load_model(path, dtype="fp32", device="cpu") for path in (model, out))
    changed = [
        name
        for (name, one), (_, other) in zip(
            before.named_parameters(), after.named_parameters(), strict=True
        )
        if not torch.equal(one, other)
    ]
    assert changed == [
        f"layers.0.{name}.weight" for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    ]
    assert main(["generate", str(out), "hello", "--max-tokens", "2", "--device", "cpu"]) == 0
    words_of = ("train", "--merge", str(run), "--out", str(out), "--device", "cpu")
    refused(capsys, UsageError, "--out not empty", *words_of)


def test_a_merge_that_changes_the_model_is_refused(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = merging.merge

    def twice(model: Any) -> None:
        for layer in merging.adapters_of(model).values():
            layer.scale *= 1.05
        plain(model)

    monkeypatch.setattr(merging, "merge", twice)
    argv = ("train", "--merge", str(run), "--out", str(tmp_path / "merged"), "--device", "cpu")
    refused(capsys, QualityError, "logits differ rounding nothing was written", *argv)
    assert not (tmp_path / "merged").exists()


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("scheme", ["int4-g32", "fp8"])
def test_a_quantized_base(
    scheme: str, model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Codes stay codes while adapters learn; merging decodes them."""
    small, out, merged = (tmp_path / name for name in ("small", "run", "merged"))
    loose = ("--method", "rtn", "--sequences", "1", "--max-kl", "9", "--max-ppl-increase", "0.9")
    argv = ("quantize", str(model), "--scheme", scheme, "--out", str(small), *loose)
    assert main([*argv, "--device", "cpu", "--batch-sizes", "none"]) == 0
    assert is_quantized(open_checkpoint(small))
    called(capsys, *words(small, text, out, "--lora", "4"))
    held_out = [row["held_out_loss"] for row in read_metrics(out) if "held_out_loss" in row]
    assert held_out[-1] < held_out[0] - 0.03
    document = called(capsys, "train", "--merge", str(out), "--out", str(merged), "--device", "cpu")
    assert document["difference"] <= document["rounding"] + 1e-4
    assert not is_quantized(open_checkpoint(merged))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--lora-alpha", "4"), "--lora-alpha --lora RANK"),
        (("--lora", "0"), "lora 0 1"),
        (("--lora", "4", "--lora-targets", "q_prj"), "q_prj q_proj"),
        (("--lora", "4", "--lora-targets", ","), "lora_targets q_proj,v_proj"),
    ],
)
def test_orders_that_make_no_sense(
    more: tuple[str, ...], line: str, model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    refused(capsys, UsageError, line, *words(model, text, tmp_path / "run", *more))


def test_merging_what_has_no_adapters(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    merge = ("train", "--merge", str(tmp_path), "--out", str(tmp_path / "x"), "--device", "cpu")
    refused(capsys, UsageError, "--merge no training run", *merge)
    refused(capsys, UsageError, "--merge --out FOLDER", "train", "--merge", str(tmp_path))
    called(capsys, *words(model, text, tmp_path / "run", steps=1))
    merge = ("train", "--merge", str(tmp_path / "run"), "--out", str(tmp_path / "x"))
    refused(capsys, UsageError, "no adapters whole models", *merge)
