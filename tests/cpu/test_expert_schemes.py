"""`--scheme` on models with experts, which have no quantized kernel: attention is quantized, the
answers are those of its codes, and how many bytes stay as they were is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from command_line import generate
from engines import engine_for, naive_outputs
from rich.console import Console
from test_engine_schemes import decoded
from tiny_tokenizers import byte_level_json

from ridgeline.cli import main
from ridgeline.cli.tables.quantize import render
from ridgeline.data import Tokenizer
from ridgeline.engine import Sampling
from ridgeline.models.transformer import DenseMLP, ExpertMLP
from ridgeline.quantization import load_model
from ridgeline.quantization.linear import QuantizedLinear, schemes_of
from ridgeline.quantization.nearest import load_nearest
from ridgeline.quantization.scheme import parse_scheme

NAMES = ["mixtral", "qwen3-moe-mixed"]
TEXT = "The quick brown fox jumps over the lazy dog, and again. " * 40


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.SMALL, "vocab_size", 1500)
        tiny_models.save_model(request.param, path)
    byte_level_json().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def expert_bytes(path: Path) -> tuple[int, int]:
    """Of experts and of all weights, in fp32."""
    model = load_model(path, dtype="fp32", device="cpu")
    experts = [module for module in model.modules() if isinstance(module, ExpertMLP)]
    held = sum(mlp.gate_up.nbytes + mlp.down.nbytes for mlp in experts)
    return held, sum(parameter.nbytes for parameter in model.parameters())


def test_what_generate_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts, all_weights = expert_bytes(folder)
    found = run_json(capsys, *generate(folder, "--scheme", "int8", "--quantize-all", "--raw"))
    assert found["scheme"] == "int8"
    assert found["plain_expert_bytes"] == experts
    assert experts < found["weight_bytes"] < all_weights
    plain = run_json(capsys, *generate(folder, "--raw"))
    assert (plain["scheme"], plain["plain_expert_bytes"]) == (None, 0)
    assert plain["weight_bytes"] == all_weights
    assert main(list(generate(folder, "--scheme", "int8", "--quantize-all", "--raw"))) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "experts" in line]
    assert len(lines) == 1
    assert "experts are not quantized" in lines[0]
    assert "in fp32" in lines[0]


def test_answers_are_those_of_the_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention (and a dense layer among the others) in codes, through the command and the plain
    loop.
    """
    about = (
        "--scheme",
        "int8",
        "--quantize-all",
        "--raw",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    )
    found = run_json(capsys, *generate(folder, *about))
    model = load_nearest(folder, parse_scheme("int8"), torch.float32, "cpu")
    dense = [m for m in model.modules() if isinstance(m, DenseMLP)]
    assert len(schemes_of(model)) == 2 * model.config.num_layers + 2 * len(dense)
    greedy = Sampling(temperature=0.0, max_tokens=8)
    prompt = Tokenizer.load(folder).encode("hello")
    assert len(found["tokens"]) == 8
    assert [tuple(found["tokens"])] == naive_outputs(decoded(model), prompt, greedy)
    engine = engine_for(model)
    assert any(isinstance(module, QuantizedLinear) for module in engine.model.modules())


def test_what_quantize_says(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    quick = ("--sequences", "2", "--window", "40", "--bytes", "800", "--device", "cpu")
    bounds = ("--max-kl", "1", "--max-ppl-increase", "0.9", "--text", str(text))
    every = ("--batch-sizes", "none", "--dtype", "fp32")
    about = ("quantize", str(folder), "--scheme", "int8", *every, *quick, *bounds, "--out")
    found = run_json(capsys, *about, str(tmp_path / "out"))
    experts, all_weights = expert_bytes(folder)
    assert found["plain_expert_bytes"] == experts
    assert found["num_quantized"] == len(found["matrices"]) > 0
    assert found["file_bytes_after"] < all_weights
    answer = ("--raw", "--max-tokens", "8", "--temperature", "0")
    saved = run_json(capsys, *generate(tmp_path / "out", *answer))
    at_once = run_json(capsys, *generate(folder, "--scheme", "int8", "--quantize-all", *answer))
    assert saved["tokens"] == at_once["tokens"]
    assert saved["plain_expert_bytes"] == experts
    assert saved["scheme"] == "int8"
    render(found, Console(width=200))
    assert "experts are not quantized" in " ".join(capsys.readouterr().out.split())
