"""`ridgeline train --qat`, `--sparsity` and `--distill` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data import Tokenizer
from ridgeline.errors import UsageError
from ridgeline.quantization import load_model
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.scheme import decode, encode, find_grid, parse_scheme
from ridgeline.training.documents import PackedDocuments
from ridgeline.training.watching.metrics import read_metrics

Capture = pytest.CaptureFixture[str]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 fit
LOOSE = ("--max-kl", "9", "--max-ppl-increase", "0.9", "--batch-sizes", "none", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT[:40_000])
    return path


def words(model: Path, text: Path, out: Path, *more: str, steps: int = 6) -> list[str]:
    paths = [str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    usual = ["--sequence-length", "32", "--batch", "4", "--lr", "5e-3", "--precision", "fp32"]
    return ["train", *paths, *usual, "--steps", str(steps), "--warmup", "2", *more]


def losses(out: Path, name: str = "loss") -> list[float]:
    return [row[name] for row in read_metrics(out) if name in row]


@pytest.mark.slow
def test_rounding_the_result_gives_what_was_trained(
    model: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The held-out loss of the last step is that of the model that `quantize` writes."""
    run, small = tmp_path / "run", tmp_path / "small"
    assert main([*words(model, text, run, "--qat", "int4-g32", "--held-out", "0.2"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["held_out_loss"] < done["held_out_loss_before"] - 0.1
    last = run / "checkpoints" / "step-00000006"
    rtn = ("--scheme", "int4-g32", "--method", "rtn", "--sequences", "1")
    assert main(["quantize", str(last), *rtn, "--out", str(small), *LOOSE]) == 0
    capsys.readouterr()
    trained, written = (load_model(path, dtype="fp32", device="cpu") for path in (last, small))
    scheme = parse_scheme("int4-g32")
    for linear in quantizable(trained).values():
        weight = linear.weight.data
        linear.weight.data = decode(encode(weight, find_grid(weight, scheme), scheme), scheme)
    ids = torch.tensor(Tokenizer.load(model).encode(TEXT[:300])[:48])
    documents = PackedDocuments(torch.arange(len(ids)), torch.tensor([0, len(ids)]))
    with torch.no_grad():
        one, other = (each.logits(each(ids, documents)) for each in (trained, written))
    assert (one - other).abs().max() < 0.02 * one.abs().max()  # scales are stored in bf16


def test_a_teacher(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    """A model that was changed learns to answer as it did; a run goes on with its teacher."""
    changed, run = tmp_path / "changed", tmp_path / "run"
    assert main([*words(model, text, changed, steps=3), "--json"]) == 0
    student = changed / "checkpoints" / "step-00000003"
    more = ("--distill", str(model), "--schedule", "constant", "--save-every", "4")
    assert main([*words(student, text, run, *more, steps=4), "--json"]) == 0
    resumed = ["train", "--out", str(run), "--resume", "--steps", "8", "--device", "cpu", "--json"]
    assert main(resumed) == 0
    divergences = losses(run)
    assert len(divergences) == 8
    assert divergences[-1] < 0.5 * divergences[0]
    other = make_folder(tmp_path / "other", vocab_size=1600)
    argv = words(model, text, tmp_path / "x", "--distill", str(other))
    refused(capsys, UsageError, "--distill 1,600 1,500 tokenizer", *argv)


def test_a_pruned_model(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    pruned, run = tmp_path / "pruned", tmp_path / "run"
    loaded: Any = load_model(model, dtype="fp32", device="cpu")
    from ridgeline.quantization import save_model
    from ridgeline.quantization.methods.sparsity import parse_sparsity

    for linear in quantizable(loaded).values():
        linear.weight.data[parse_sparsity("2:4").mask(linear.weight.data.abs())] = 0.0
    save_model(loaded, pruned, source=model, extra_files=Tokenizer.load(model).files())
    assert main([*words(pruned, text, run, "--sparsity", "2:4"), "--json"]) == 0
    after = load_model(run / "checkpoints" / "step-00000006", dtype="fp32", device="cpu")
    for name, linear in quantizable(after).items():
        before = quantizable(loaded)[name].weight
        assert torch.equal(linear.weight == 0, before == 0), name
        assert not torch.equal(linear.weight, before)
    argv = words(model, text, tmp_path / "x", "--sparsity", "2:4")
    refused(capsys, UsageError, "sparsity 2:4 zeros prune", *argv)


def test_the_named_runs() -> None:
    from ridgeline.configs.named import named_run

    assert named_run("configs:lora_demo").lora.rank == 16
    assert named_run("configs:qat_demo").qat.scheme == "int4-g64"
    assert json.dumps(named_run("configs:qat_demo").distill.teacher) == '"demo"'
