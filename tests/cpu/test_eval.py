"""`ridgeline eval`: documents, tables, records and the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder
from safetensors.torch import load_file, save_file
from written_text import documents

from ridgeline.cli import main
from ridgeline.engine import Engine
from ridgeline.errors import QualityError
from ridgeline.quality.perplexity import perplexity
from ridgeline.quality.windows import cut
from ridgeline.recipe import KV, Recipe

Capture = pytest.CaptureFixture[str]
ROW = {"query": "Question: What is wet?", "choices": ["sand", "water"], "gold": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def changed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one matrix that is a little wrong."""
    target = make_folder(tmp_path_factory.mktemp("changed"), num_hidden_layers=2)
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] += torch.randn_like(weights[name]) * weights[name].std() * 0.2
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(documents()[0][:2000])
    return path


def evaluated(capsys: Capture, *argv: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["eval", *map(str, argv), "--device", "cpu", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_perplexity_of_a_text(folder: Path, text: Path, capsys: Capture) -> None:
    result = evaluated(capsys, folder, "--text", text, "--window", 100, "--kv-dtype", "int8")
    engine = Engine(folder, Recipe(kv=KV(dtype="int8")), device="cpu")
    assert engine.tokenizer is not None
    right = perplexity(engine, cut(text.read_text(), engine.tokenizer, 100))
    assert result["text"]["perplexity"]["value"] == pytest.approx(right.perplexity.value, rel=1e-9)
    assert result["text"]["perplexity"]["low"] < result["text"]["perplexity"]["value"]
    assert (result["kv_dtype"], result["against"], result["gate"]) == ("int8", None, None)
    part = evaluated(capsys, folder, "--text", text, "--window", 100, "--bytes", 500)
    assert part["text"]["num_tokens"] < result["text"]["num_tokens"] / 3


@pytest.mark.parametrize(("dtype", "near"), [("fp32", 1e-5), ("bf16", 3e-3)])
def test_a_peer_on_the_same_ids(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture, dtype: str, near: float
) -> None:
    argv = [folder, "--text", text, "--window", 100, "--peer", "transformers", "--dtype", dtype]
    result = evaluated(capsys, *argv, "--save", tmp_path / "records")
    ours, peer = result["text"], result["peer"]
    assert (peer["name"], peer["dtype"]) == ("transformers", dtype)
    assert (peer["num_tokens"], peer["num_windows"]) == (ours["num_tokens"], ours["num_windows"])
    share = ours["perplexity"]["value"] / peer["perplexity"]["value"] - 1
    assert peer["difference"]["value"] == pytest.approx(share, rel=1e-3, abs=1e-9)
    assert abs(share) < near
    values = json.loads(Path(result["record"]).read_text())["values"]
    assert values["transformers_perplexity"]["value"] == peer["perplexity"]["value"]
    assert values["difference_from_transformers"]["value"] == peer["difference"]["value"]
    assert main(["eval", *map(str, argv), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"in {dtype}, KV in {dtype}" in " ".join(shown.split())
    assert "ours to theirs, same tokens" in " ".join(shown.split())


def test_a_recipe_is_obeyed(folder: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    path = Recipe(dtype="bf16", kv=KV(dtype="int8")).save(tmp_path)
    argv = (folder, "--text", text, "--window", 100, "--recipe", path)
    result = evaluated(capsys, *argv, "--kv-dtype", "fp32")
    assert (result["dtype"], result["kv_dtype"]) == ("bf16", "fp32")  # a flag goes before the file


def test_against_the_original(
    folder: Path, changed: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "gold": 0}))
    argv = [changed, "--text", text, "--window", 100, "--against", folder, "--layers"]
    argv += ["--task", "arc", "--data", rows, "--save", tmp_path / "records"]
    result = evaluated(capsys, *argv, "--max-kl", 10)
    compared = result["against"]["divergence"]
    assert compared["mean_kl"]["value"] > 1e-4
    assert compared["mean_kl"]["low"] < compared["mean_kl"]["value"] < compared["mean_kl"]["high"]
    original, ours = compared["original"]["perplexity"], result["text"]["perplexity"]
    share = ours["value"] / original["value"] - 1
    assert compared["perplexity_increase"]["value"] == pytest.approx(share, rel=1e-6)
    worst = [part["name"] for part in result["against"]["layers"][:2]]
    assert worst == ["layers.1", "layers.1.mlp.down"]
    assert result["gate"]["passed"]
    assert result["task"]["score"]["value"] == 0.5  # of two questions with each answer right once
    assert result["task"]["num_questions"] == 2
    assert "difference" in result["task"]
    record = json.loads(Path(result["record"]).read_text())
    assert record["values"]["mean_kl"]["value"] == compared["mean_kl"]["value"]
    assert {"perplexity_low", "arc", "arc_acc", "perplexity_increase_high"} <= set(record["values"])


def test_the_gate(folder: Path, changed: Path, text: Path, capsys: Capture) -> None:
    argv = [changed, "--text", text, "--window", 100, "--against", folder]
    result = evaluated(capsys, *argv, "--max-kl", 1e-6, code=QualityError.exit_code)
    assert not result["gate"]["passed"]
    assert main(["eval", *map(str, argv), "--device", "cpu", "--max-kl", "1e-6"]) == 17
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("refused")]
    assert f"mean KL is {result['against']['divergence']['mean_kl']['value']:.5f}" in line
    assert "allowed is 1e-06" in line
    itself = evaluated(capsys, folder, *argv[1:], "--max-kl", 0, "--max-ppl-increase", 0)
    assert itself["gate"]["passed"]


def test_what_people_see(
    folder: Path, text: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    argv = ["eval", str(folder), "--text", str(text), "--window", "100", "--dtype", "bf16"]
    argv += ["--against", str(folder), "--against-dtype", "fp32", "--layers", "--device", "cpu"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for words in ("perplexity", "95% interval", "mean KL", "windows of 100", "signal to error"):
        assert words in shown
    assert f"{folder} in bf16, KV in bf16" in " ".join(shown.split())
    assert "fp32, KV in fp32" in shown  # the original
    assert "refused" not in shown
