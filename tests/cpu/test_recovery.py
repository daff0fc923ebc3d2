"""`ridgeline quantize --recover`: training begins with the codes that were found, and ends with
codes that answer more like the original.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import make_folder, refused
from packed import tiny
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data import Tokenizer
from ridgeline.errors import UsageError
from ridgeline.ladder.quantizing import recovery
from ridgeline.ladder.quantizing.recovery import RecoveryOptions, starting_weight, student_of
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.quantization import load_model
from ridgeline.quantization.files import is_quantized
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.scheme import Codes, encode, find_grid, parse_scheme, spread
from ridgeline.training.config import BatchOptions, RunLength

Capture = pytest.CaptureFixture[str]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # groups of 32 fit
LOOSE = ("--max-kl", "9", "--max-ppl-increase", "0.9", "--batch-sizes", "none", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT[:60_000])
    return path


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym"])
def test_training_begins_with_the_codes(name: str) -> None:
    """With codes that are not the nearest ones, as GPTQ's are not."""
    scheme, model = parse_scheme(name), tiny(intermediate_size=64)
    codes = {}
    for key, linear in quantizable(model).items():
        weight = linear.weight.data
        moved = weight + 0.7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        codes[key] = (encode(moved, find_grid(weight, scheme), scheme), scheme)
    student, rounded = student_of(model, codes, model)
    for key, (given, _) in codes.items():
        rounding = rounded.roundings[f"{key}.weight"]
        assert torch.equal(rounding.codes().values, given.values), key
        assert quantizable(student)[key].weight is rounding.weight_OD
        assert quantizable(model)[key].weight is not rounding.weight_OD
    assert student.embed.weight is model.embed.weight
    weight = torch.linspace(-1, 1, 64).view(2, 32)
    nearest = encode(weight, find_grid(weight, scheme), scheme)
    if name == "int4-g32":
        start = starting_weight(weight, Codes(nearest.values, nearest.grid), scheme)
        inside = (start - weight).abs() < 1e-6
        assert inside.float().mean() > 0.7


def test_codes_learn_to_answer_as_the_original(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_config = recovery.recovery_config

    def short(*given: object) -> object:
        config = plain_config(*given)  # type: ignore[arg-type]
        data = replace(config.data, sequence_length=64)
        batch = BatchOptions(4, 2)
        return replace(config, data=data, batch=batch, end=RunLength(steps=60))

    monkeypatch.setattr(recovery, "recovery_config", short)
    monkeypatch.setattr(recovery, "LENGTH", 64)
    original = load_model(model, dtype="fp32", device="cpu")
    before = {name: value.clone() for name, value in original.named_parameters()}
    scheme = parse_scheme("int4-g32")
    codes, generator = {}, torch.Generator().manual_seed(4)
    for name, linear in quantizable(original).items():  # a method that is often off by one
        weight, grid = linear.weight.data, find_grid(linear.weight.data, scheme)
        bins = spread(grid.scale, weight.shape) * torch.randn(weight.shape, generator=generator)
        codes[name] = (encode(weight + 0.7 * bins, grid, scheme), scheme)
    options = RecoveryOptions(minutes=1.0, data=str(text), lr=1e-3)
    made = recovery.recover(original, codes, original, Tokenizer.load(model), options)
    first, last = made.report.divergence
    assert (made.report.steps, made.codes.keys()) == (60, codes.keys())
    assert last < 0.7 * first
    changed = [
        name for name, (each, _) in made.codes.items()
        if not torch.equal(each.values, codes[name][0].values)
    ]  # fmt: skip
    assert changed == list(codes)
    for name, value in original.named_parameters():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_the_command(model: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "small"
    argv = ["quantize", str(model), "--scheme", "int4-g32", "--method", "rtn", "--sequences", "1"]
    recover = ["--recover", "0.01", "--recover-data", str(text), "--out", str(out)]
    capsys.readouterr()
    assert main([*argv, *recover, *LOOSE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    made = document["recovery"]
    assert made["steps"] >= 1
    assert made["before"]["perplexity_increase"] != document["quality"]["perplexity_increase"]
    assert is_quantized(open_checkpoint(out))
    other = tmp_path / "other"
    words = [*argv, "--recover", "0.01", "--out", str(other), *LOOSE]
    assert main(words) == 0
    assert "recovery: perplexity" in capsys.readouterr().out
    assert main([*argv, *recover[:-1], str(tmp_path / "refused"), *LOOSE, "--max-kl", "1e-9"]) == 17
    assert "recovery: perplexity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--scheme", "int4-g32", "--recover-data", "x"), "--recover-data --recover MINUTES"),
        (("--scheme", "int4-g32", "--recover", "0"), "recover 0"),
        (("--scheme", "int4-g32", "--recover", "1", "--auto-mixed"), "--recover --scheme"),
        (("--scheme", "w8a8-int8", "--method", "rtn", "--recover", "1"), "inputs"),
    ],
)
def test_orders_that_make_no_sense(
    more: tuple[str, ...], line: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ("quantize", str(model), "--out", str(tmp_path / "x"), *more, "--device", "cpu")
    refused(capsys, UsageError, line, *argv)
