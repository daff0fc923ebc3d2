"""What `ridgeline quantize` says of its result: sizes in files, dtypes of what is not quantized,
intervals beside the bounds, a scheme that fits, and the text that it was judged on.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from command_line import make_folder
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import SMALL, spread_weights
from tiny_tokenizers import byte_level_metadata
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data.judged_text import judged_text
from ridgeline.errors import UsageError
from ridgeline.hardware.units import human_bytes
from ridgeline.ladder.measuring import judging
from ridgeline.ladder.measuring.judging import Judge, Measured
from ridgeline.ladder.quantizing import quantize_job
from ridgeline.ladder.state import applied, baseline
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.quantization.files.plain import plain_storage
from ridgeline.quantization.fitting import scheme_fit
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import MatrixSize

Capture = pytest.CaptureFixture[str]
JOB = "ridgeline.ladder.quantizing.quantize_job"
WIDE = ["--max-kl", "9", "--max-ppl-increase", "0.99"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 192 weights, which groups of 128 do not fit, except those of `down`."""
    shape = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
    return make_folder(tmp_path_factory.mktemp("model"), **shape)


@pytest.fixture(scope="module")
def q4_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms are in fp32 as llama.cpp writes them, all but one of them beyond bf16."""
    tokenizer = byte_level_metadata("smollm")
    shape = {"hidden_size": 64, "num_hidden_layers": 1}
    shape |= {"vocab_size": len(tokenizer["tokenizer.ggml.tokens"])}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | shape)).float()
    spread_weights(model)
    with torch.no_grad():
        model.model.norm.weight.copy_(model.model.norm.weight.bfloat16())
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(model, path, gguf.GGMLQuantizationType.Q4_1, tokenizer)
    return path


@pytest.fixture(autouse=True)
def shorter_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones take longest of all to tokenize."""
    calibration, judged = TEXT[:40_000], judged_text()[:3000]
    monkeypatch.setattr(f"{JOB}.default_text", lambda: calibration)
    monkeypatch.setattr(f"{JOB}.judged_text", lambda *_: judged)


def argv(model: Path, out: Path, *more: str, scheme: str = "int8") -> list[str]:
    quick = ["--sequences", "4", "--window", "60", "--device", "cpu", "--batch-sizes", "none"]
    return ["quantize", str(model), "--scheme", scheme, "--out", str(out), *quick, *WIDE, *more]


def result_of(capsys: Capture, *words: Any) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def shown(capsys: Capture, *words: Any) -> str:
    """What people see, as one line."""
    assert main([*map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def stored(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_are_those_of_files_and_a_larger_result_is_named(
    q4_1: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    document = result_of(capsys, *argv(q4_1, out))
    after = (out / "model.safetensors").stat().st_size
    assert document["file_bytes_before"] == q4_1.stat().st_size < after
    assert document["file_bytes_after"] == after
    assert "this model is larger than the original" in document["larger"]
    assert (
        f"{human_bytes(after)} in files, not {human_bytes(q4_1.stat().st_size)}"
        in (document["larger"])
    )
    assert "(mostly Q4_1, 5." in document["larger"]
    assert "in int8 this model is larger" in caplog.text
    table = shown(capsys, *argv(q4_1, tmp_path / "shown"))
    change = after / q4_1.stat().st_size - 1
    sizes = f"{human_bytes(q4_1.stat().st_size)} {human_bytes(after)} {change:+.0%}"
    assert f"weights in files {sizes}" in table
    assert "larger than the original" in table
    assert re.search(r"[;:] int4-g64 takes about [0-9.]+ [KM]iB$", document["larger"])


def test_a_larger_result_is_named_before_the_work(
    q4_1: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise UsageError("stopped before the work")

    monkeypatch.setattr("ridgeline.cli.quantize.load_model", stop)
    assert main(argv(q4_1, tmp_path / "out")) == UsageError.exit_code
    assert "in int8 this model is larger than the original" in caplog.text


def test_a_smaller_result_is_not(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    document = result_of(capsys, *argv(folder, tmp_path / "out"))
    before = (folder / "model.safetensors").stat().st_size
    assert document["file_bytes_before"] == before > document["file_bytes_after"]
    assert document["larger"] is None


# --- what is not quantized ------------------------------------------------------------------------


def test_plain_tensors_are_saved_in_bf16(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of an fp32 model too; in fp32 only where that is asked for."""
    table = shown(capsys, *argv(folder, tmp_path / "usual", "--skip", "*.down"))
    assert "weights that are not quantized are saved in bf16" in table
    tensors = stored(tmp_path / "usual")
    plain = [name for name in tensors if name.endswith(".weight")]
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"} <= set(plain)
    assert {tensors[name].dtype for name in plain} == {torch.bfloat16}
    config = json.loads((tmp_path / "usual" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    asked = result_of(capsys, *argv(folder, tmp_path / "asked", "--dtype", "fp32"))
    assert asked["stored_dtype"] == "fp32"
    tensors = stored(tmp_path / "asked")
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32


def test_what_the_original_keeps_in_fp32_stays_where_bf16_would_change_it(
    q4_1: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    document = result_of(capsys, *argv(q4_1, out))
    names = ["layers.0.attn_norm.weight", "layers.0.mlp_norm.weight"]
    assert sorted(document["stored_exactly"]) == names
    tensors = stored(out)
    assert tensors["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    assert tensors["model.norm.weight"].dtype == torch.bfloat16
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    table = shown(capsys, *argv(q4_1, tmp_path / "shown"))
    assert f"in fp32 as in the original, which is exact: {', '.join(names)}" in table


def test_an_original_in_fp16_stays_in_fp16(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Which is more exact than bf16 and no larger."""
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    tensors = {name: value.half() for name, value in stored(half).items()}
    save_file(tensors, half / "model.safetensors", {"format": "pt"})
    document = result_of(capsys, *argv(half, tmp_path / "out"))
    assert document["stored_dtype"] == "fp16"
    name = "model.embed_tokens.weight"
    assert torch.equal(stored(tmp_path / "out")[name], tensors[name])
    checkpoint = open_checkpoint(half)
    assert plain_storage(checkpoint, describe(checkpoint), "bf16").dtype == torch.bfloat16


# --- the verdict ----------------------------------------------------------------------------------


def test_intervals_are_shown_when_a_model_is_kept(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    document = result_of(capsys, *argv(folder, tmp_path / "out"))
    kl, more = document["quality"]["mean_kl"], document["quality"]["perplexity_increase"]
    figures = f"mean KL is {kl['value']:.5f} ({kl['low']:.5f} to {kl['high']:.5f}), allowed is 9"
    change = f"{more['value']:+.2%} ({more['low']:+.2%} to {more['high']:+.2%})"
    assert figures in document["verdict"]
    assert f"perplexity changes by {change}, allowed is +99.00%" in document["verdict"]
    assert document["verdict"].startswith("within the quality bounds: ")
    table = shown(capsys, *argv(folder, tmp_path / "shown"))
    assert "95% interval" in table
    assert f"{kl['value']:.5f} {kl['low']:.5f} to {kl['high']:.5f}" in table
    assert figures in table


def test_an_interval_that_ends_outside_is_said(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    kl = result_of(capsys, *argv(folder, tmp_path / "first"))["quality"]["mean_kl"]
    allowed = ["--max-kl", str((kl["value"] + kl["high"]) / 2)]
    verdict = result_of(capsys, *argv(folder, tmp_path / "near", *allowed))["verdict"]
    assert "the interval of mean KL ends outside: give a longer text" in verdict
    short = tmp_path / "short.txt"
    short.write_text("Only a few words.")
    one = result_of(capsys, *argv(folder, tmp_path / "one", "--text", str(short)))["verdict"]
    assert "one window gives no interval" in one


# --- groups that fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--auto-mixed"]], ids=["scheme", "auto-mixed"])
def test_a_group_size_that_fits_is_proposed(
    more: list[str],
    folder: Path,
    tmp_path: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [*argv(folder, tmp_path / "out", *more, scheme="int4-g128"), "--method", "rtn"]
    document = result_of(capsys, *words)
    assert document["num_quantized"] == 2
    fit = document["fit"]
    assert (len(fit["unfit"]), fit["num_projections"], fit["row_lengths"]) == (6, 8, [192])
    assert (fit["proposal"], fit["num_proposed"]) == ("int4-g64", 8)
    message = "int4-g128 does not fit 6 of 8 projections (layers.0.attn.qkv …), whose rows of 192 "
    message += "weights do not divide by 128: they are not quantized; int4-g64 fits all 8"
    assert fit["message"] == message
    assert caplog.text.count(message) == 1
    words[words.index(str(tmp_path / "out"))] = str(tmp_path / "shown")
    table = shown(capsys, *words)
    assert message in table
    assert "projections not quantized:" not in table  # the same ones again
    words = argv(folder, tmp_path / "better", "--method", "rtn", scheme="int4-g64")
    better = result_of(capsys, *words)
    assert (better["num_quantized"], better["fit"]) == (8, None)


def test_a_group_size_is_proposed_before_the_work(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise UsageError("stopped before the work")

    monkeypatch.setattr(f"{JOB}.prepared", stop)
    assert main(argv(folder, tmp_path / "out", scheme="int4-g128")) == UsageError.exit_code
    assert "int4-g64 fits all 8" in caplog.text


def test_which_scheme_is_proposed() -> None:
    def proposed(scheme: str, *shapes: tuple[int, int]) -> tuple[str | None, int]:
        matrices = {f"matrix {i}": MatrixSize(*shape) for i, shape in enumerate(shapes)}
        fit = scheme_fit(matrices, parse_scheme(scheme))
        return fit.proposal, fit.num_proposed

    demo = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30
    assert proposed("int4-g128", *demo) == ("int4-g64", 120)
    assert proposed("int4-g128-asym", *demo) == ("int4-g64-asym", 120)
    assert proposed("int4-g64", *demo) == (None, 0)
    assert proposed("int4-g128", (64, 96), (64, 64), (64, 40)) == ("int4-g32", 2)
    assert proposed("int4-g32", (64, 40), (64, 64)) == ("int8", 2)
    assert proposed("fp8-block", (960, 576)) == ("fp8", 1)


# --- the text -------------------------------------------------------------------------------------


def test_a_model_is_judged_on_text_unlike_the_calibration_s(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    """Also where a calibration text was given: its end is calibrated on like the rest."""
    judged: list[str] = []
    calibrated: list[str] = []
    windows_of, batches_of = quantize_job.cut, quantize_job.calibration_batches

    def cut(text: str, *more: Any) -> Any:
        judged.append(text)
        return windows_of(text, *more)

    def calibration_batches(tokenizer: Any, text: str, **more: Any) -> Any:
        calibrated.append(text)
        return batches_of(tokenizer, text, **more)

    monkeypatch.setattr(quantize_job, "cut", cut)
    monkeypatch.setattr(quantize_job, "calibration_batches", calibration_batches)
    own = tmp_path / "own.txt"
    own.write_text(TEXT[50_000:80_000])
    table = shown(capsys, *argv(folder, tmp_path / "out", "--calibration", str(own)))
    assert judged == [judged_text()[:3000]]
    assert calibrated == [own.read_text()]
    assert "measured on the built-in text (" in table
    assert "own.txt" in table.replace(" ", "")


def test_a_climb_judges_on_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    windows_of = judging.cut

    def cut(text: str, *more: Any) -> Any:
        judged.append(text)
        return windows_of(text, *more)

    monkeypatch.setattr(judging, "cut", cut)
    state = applied(baseline("cpu"), {"loop": "engine", "scheme": "int8"}).to_json()
    measured = Measured(window=60, num_windows=4).to_json()
    quality = Judge().compare(str(folder), "cpu", state, measured, {"max_kl": 9.0})
    assert judged == [judged_text()[:3000]]
    assert (quality["num_tokens"], quality["problem"]) == (4 * 59, None)
    assert 0 < quality["mean_kl_low"] < quality["mean_kl"] < quality["mean_kl_high"]
