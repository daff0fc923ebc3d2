"""`ridgeline quantize`: measured, kept or refused; what is saved runs as it was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizers import byte_level_metadata
from transformers import LlamaConfig, LlamaForCausalLM
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import default_text
from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.ladder.quantizing import quantize_job
from ridgeline.ladder.quantizing.quantize_job import QuantizeJob, advice, quantize, save, texts
from ridgeline.models import Transformer
from ridgeline.quality.gate import QualityBounds
from ridgeline.quantization import load_model
from ridgeline.quantization.linear import QuantizedLinear, quantizable
from ridgeline.quantization.methods import Gptq, Rtn, SmoothQuant
from ridgeline.quantization.scheme import parse_scheme

ALL = QualityBounds(max_kl=10.0, max_ppl_increase=0.99)
JUDGED, CALIBRATION = TEXT[:3000], TEXT[10_000:40_000]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata("smollm"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name, content in tokenizer.files().items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder, dtype="fp32", device="cpu")


def job(scheme: str = "int8", method: Any = None, **changes: Any) -> QuantizeJob:
    about = {"num_sequences": 4, "text": JUDGED, "window": 60, "bounds": ALL}
    about |= {"calibration": CALIBRATION} | changes
    return QuantizeJob(parse_scheme(scheme), method or Rtn(), **about)


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize(
    ("scheme", "method"),
    [("int8", Rtn()), ("int4-g32", Gptq()), ("w8a8-int8", SmoothQuant()), ("fp8", SmoothQuant())],
)
def test_what_is_saved_is_what_was_measured(
    model: Transformer,
    tokenizer: Tokenizer,
    folder: Path,
    tmp_path: Path,
    scheme: str,
    method: Any,
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quantize(model, tokenizer, job(scheme, method))
    assert found.problem is None
    assert found.codes
    assert 0 < found.quality.mean_kl.value < 1
    save(found, tmp_path / "out", source=folder, tokenizer=tokenizer)
    loaded = Engine(tmp_path / "out", device="cpu").model
    kinds = {name: type(loaded.get_submodule(name)) for name in quantizable(model)}
    assert {name for name, kind in kinds.items() if kind is QuantizedLinear} == set(found.codes)
    for name, (codes, _) in found.codes.items():
        layer = loaded.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        assert layer.scheme.weight == parse_scheme(scheme).weight
        assert layer.out_features == len(codes.values)
    again = quantize_job.with_schemes(found.plain, found.codes)
    for name in found.codes:
        left, right = loaded.get_submodule(name), again.get_submodule(name)
        assert torch.equal(left.decoded(), right.decoded())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_outside_the_bound_is_refused_with_advice(
    model: Transformer, tokenizer: Tokenizer
) -> None:
    found = quantize(model, tokenizer, job(bounds=QualityBounds(max_kl=0.0)))
    assert found.problem is not None
    assert "mean KL" in advice(found)
    assert "layers." in advice(found)
    assert len(found.trials) == 1


def test_skipped_and_unfit_projections_stay(model: Transformer, tokenizer: Tokenizer) -> None:
    found = quantize(model, tokenizer, job(skip=("layers.0.*", "*.down")))
    assert "layers.0.attn.qkv" in found.stays
    assert all(not name.endswith(".down") for name in found.codes)
    with pytest.raises(UsageError, match="names no projection"):
        quantize(model, tokenizer, job(skip=("layers.99.*",)))
    with pytest.raises(UsageError, match="fits none"):
        quantize(model, tokenizer, job("int4-g128"))


def test_texts_do_not_overlap() -> None:
    """The built-in text to judge by shares no eight words in a row with Python's help."""
    calibration, judged = texts(replace(job(), text=None, calibration=None))
    assert calibration == default_text()
    assert len(judged) > 25_000
    assert not runs_of_words(calibration) & runs_of_words(judged)
    assert texts(replace(job(), text=None)) == (CALIBRATION, judged)
    assert texts(job())[1] == JUDGED


def runs_of_words(text: str, num: int = 8) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[start : start + num]) for start in range(len(words) - num + 1)}


def test_a_text_that_was_calibrated_on_is_named(caplog: pytest.LogCaptureFixture) -> None:
    texts(job())
    assert not caplog.text
    texts(job(text=CALIBRATION[5000:9000]))
    assert "part of the calibration text" in caplog.text


def test_weights_without_codes_are_measured_as_they_are_saved(
    model: Transformer, tokenizer: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    """In bf16, although the model is computed in fp32; the caller's model keeps its own."""
    result = quantize(model, tokenizer, job(skip=("*.down",)))
    save(result, tmp_path / "out", source=folder, tokenizer=tokenizer)
    loaded = dict(load_model(tmp_path / "out", dtype="fp32", device="cpu").named_parameters())
    plain = dict(result.plain.named_parameters())
    names = [name for name in plain if name.removesuffix(".weight") not in result.codes]
    assert {"embed.weight", "layers.0.mlp.down.weight", "norm.weight"} <= set(names)
    for name in names:
        assert torch.equal(plain[name], loaded[name]), name
        assert torch.equal(plain[name], plain[name].bfloat16().float()), name
    assert not torch.equal(plain["embed.weight"], model.embed.weight)


@pytest.mark.parametrize(("scheme", "method"), [("int8", Rtn()), ("int4-g32", Gptq())])
def test_an_original_on_the_host_is_worked_on_block_by_block(
    model: Transformer, tokenizer: Tokenizer, scheme: str, method: Any, monkeypatch: Any
) -> None:
    """The same codes and the same figures, and no engine ever has the original."""
    there = quantize(model, tokenizer, job(scheme, method))
    started: list[Transformer] = []

    class Noted(Engine):
        def __init__(self, model: Any, *args: Any, **options: Any) -> None:
            started.append(model)
            super().__init__(model, *args, **options)

    monkeypatch.setattr(quantize_job, "Engine", Noted)
    found = quantize(model, tokenizer, job(scheme, method, walked=True, device="cpu"))
    assert [type(one.layers[0].attn.qkv) for one in started] == [QuantizedLinear]
    assert found.codes.keys() == there.codes.keys()
    for name, (codes, _) in found.codes.items():
        assert torch.equal(codes.values, there.codes[name][0].values)
    assert found.quality.mean_kl.value == pytest.approx(there.quality.mean_kl.value, rel=1e-3)
    assert found.quality.increase.value == pytest.approx(there.quality.increase.value, abs=1e-5)
    assert found.quality.original.num_bytes == there.quality.original.num_bytes
