"""`ridgeline quantize` on the command line: what it writes, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import make_folder, refused
from safetensors.torch import load_file, save_file
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.errors import (
    CheckpointError,
    QualityError,
    RidgelineError,
    UnsupportedError,
    UsageError,
)
from ridgeline.quantization.methods import usual_method
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.records import Record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), hidden_size=64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "measured.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and again. " * 60)
    return path


@pytest.fixture(autouse=True)
def shorter_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default calibration text is half a megabyte, which takes longest of all to tokenize."""
    monkeypatch.setattr(
        "ridgeline.ladder.quantizing.quantize_job.default_text", lambda: TEXT[:40_000]
    )


def argv(folder: Path, out: Path, text: Path, *more: str, scheme: str = "int8") -> list[str]:
    quick = ["--sequences", "4", "--window", "40", "--bytes", "2000", "--device", "cpu"]
    about = ["--out", str(out), "--text", str(text), "--batch-sizes", "none"]
    named = ["--scheme", scheme] if scheme else []
    return ["quantize", str(folder), *named, *about, *quick, *more]


def test_a_checkpoint_is_written_and_runs(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(argv(folder, out, text, "--max-kl", "1", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_quantized"] == 8
    assert found["file_bytes_after"] < found["file_bytes_before"]
    assert found["quality"]["mean_kl"]["value"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    again = ["generate", str(out), "hello", "--max-tokens", "2", "--device", "cpu", "--json"]
    assert main(again) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 2
    refused(capsys, UnsupportedError, "already quantized", *argv(out, tmp_path / "b", text))


def test_bytes_without_a_text_are_of_the_built_in_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(folder), "--scheme", "int8", "--out", str(tmp_path / "out")]
    command += ["--batch-sizes", "none", "--sequences", "4", "--device", "cpu", "--json"]
    command += ["--max-kl", "1", "--max-ppl-increase", "0.9", "--window", "40", "--bytes", "1500"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] is None
    assert 100 < result["quality"]["original"]["num_bytes"] <= 1500


def test_people_see_a_table(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--max-kl", "1", "--max-ppl-increase", "0.5", "--skip", "*.down"]
    assert main(argv(folder, tmp_path / "out", text, *about)) == 0
    shown = capsys.readouterr().out
    for words in ("perplexity", "mean KL", "projections not quantized", "saved in"):
        assert words in shown


def test_an_original_on_the_host_gives_the_same(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--max-kl", "1", "--max-ppl-increase", "0.5", "--save", str(tmp_path / "records")]
    found = []
    for place in ("device", "host"):
        assert main(argv(folder, tmp_path / place, text, *wide, "--original", place, "--json")) == 0
        found.append(json.loads(capsys.readouterr().out))
        assert found[-1]["original_on"] == place
        assert found[-1]["peak_device_bytes"] is None
    kl = [one["quality"]["mean_kl"]["value"] for one in found]
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)
    files = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("device", "host")]
    assert files[0] == files[1]
    notes = [Record.from_json(json.loads(Path(one["record"]).read_text())).notes for one in found]
    assert ["from the host" in " ".join(note) for note in notes] == [False, True]
    assert main(argv(folder, tmp_path / "shown", text, *wide[:4], "--original", "host")) == 0
    assert "moved to the device block by block" in capsys.readouterr().out


def test_without_a_method_the_usual_one_is_taken(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--max-kl", "5", "--max-ppl-increase", "0.9", "--json"]
    assert main(argv(folder, tmp_path / "usual", text, *wide, scheme="fp8")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method_options"] == repr(usual_method(parse_scheme("fp8")))
    named = argv(folder, tmp_path / "named", text, *wide, "--method", "rtn", scheme="fp8")
    assert main(named) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "rtn"


def test_outside_the_bound_nothing_is_written(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = "mean KL nothing is written layers. --skip --auto-mixed"
    refused(capsys, QualityError, words, *argv(folder, out, text, "--max-kl", "0"))
    assert not out.exists()


@pytest.mark.parametrize("max_kl", ["0", "1"])
def test_a_record_is_kept_refused_or_not(
    folder: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    max_kl: str,
) -> None:
    more = ["--max-kl", max_kl, "--max-ppl-increase", "0.9", "--save", str(tmp_path / "records")]
    code = main(argv(folder, tmp_path / "out", text, *more, "--json"))
    assert code == (QualityError.exit_code if max_kl == "0" else 0)
    (file,) = (tmp_path / "records").iterdir()
    record = Record.from_json(json.loads(file.read_text()))
    values = record.values
    assert values["mean_kl_low"].value <= values["mean_kl"].value <= values["mean_kl_high"].value
    assert values["num_quantized"].value == 8
    assert 0 < values["quantizing_seconds"].value < values["total_seconds"].value
    assert values["peak_host_bytes"].value > 2**20
    assert ("file_bytes_after" in values) == (max_kl == "1")
    assert values["file_bytes_before"].value > 0
    assert record.notes[0] == "against the original in fp32; method Rtn(clip=False)"
    assert [note[:8] for note in record.notes[1:]] == ["refused:"] * (max_kl == "0")


@pytest.mark.parametrize(
    ("kind", "words", "more"),
    [
        (UsageError, "scheme int3 known", ["--scheme", "int3"]),
        (UsageError, "groups of 16 32", ["--scheme", "int4-g16"]),
        (UsageError, "fits none try int8", ["--scheme", "int4-g128"]),
        (UsageError, "--sparsity sparsegpt", ["--sparsity", "2:4"]),
        (UsageError, "--sequences 0", ["--sequences", "0"]),
        (UsageError, "--bytes -1", ["--bytes", "-1"]),
        (UsageError, "names no projection", ["--skip", "layers.9.*"]),
        (UsageError, "window", ["--window", "1"]),
        (UsageError, "max_kl", ["--max-kl", "-1"]),
        (UsageError, "--scheme --skip", ["--auto-mixed", "--original", "host"]),
    ],
)
def test_what_is_asked_wrong(
    folder: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: type[RidgelineError],
    words: str,
    more: list[str],
) -> None:
    refused(capsys, kind, words, *argv(folder, tmp_path / "out", text, *more))
    assert not (tmp_path / "out").exists()


def test_texts_and_folders(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x")
    refused(capsys, UsageError, "--out not empty", *argv(folder, full, text))
    for name, content, words in [
        ("empty.txt", b" \n", "empty"),
        ("binary.txt", b"\x00\x01abc", "zero bytes"),
        ("short.txt", b"too short", "at least 2048"),
    ]:
        (tmp_path / name).write_bytes(content)
        more = ["--calibration", str(tmp_path / name)]
        refused(capsys, UsageError, words, *argv(folder, tmp_path / "out", text, *more))
    absent = argv(folder, tmp_path / "out", tmp_path / "absent.txt")
    refused(capsys, UsageError, "absent.txt", *absent)
    inside = argv(folder, tmp_path / "out", text, "--work", str(folder / "work"))
    refused(capsys, UsageError, "--work inside the model's folder", *inside)
    (tmp_path / "work").write_text("x")
    inside = argv(folder, tmp_path / "out", text, "--work", str(tmp_path / "work"))
    refused(capsys, UsageError, "--work is a file", *inside)


def test_weights_that_are_no_numbers(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    words = "NaN layers.1.mlp.down"
    refused(capsys, CheckpointError, words, *argv(broken, tmp_path / "out", text))
