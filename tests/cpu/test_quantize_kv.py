"""`quantize --kv`: keys and values in 8 bits are measured, their scales are in the files for other
engines, and ours keeps them so unless it is told otherwise.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import edit_json, generate, make_folder, refused
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.engine.local.ranks import task_for
from ridgeline.errors import ConfigError, UnsupportedError
from ridgeline.ladder.quantizing.quantize_job import QuantizeJob, quantize
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.quality.gate import QualityBounds
from ridgeline.quantization import load_model
from ridgeline.quantization.files.read import kv_dtype, open_quantized
from ridgeline.quantization.methods import Rtn
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import KV, Parallel, Recipe

BOUNDS = QualityBounds(max_kl=10.0, max_ppl_increase=0.99)
JOB = QuantizeJob(parse_scheme("int8"), Rtn(), num_sequences=4, text=TEXT[:1000],
window=60,
          bounds=BOUNDS)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_folder(path, hidden_size=64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    quick = ["--sequences", "4", "--window", "40", "--bytes", "1500", "--device", "cpu"]
    text = out.parent / "text.txt"
    text.write_text(TEXT[:1500])
    bound = ["--max-kl", "5", "--max-ppl-increase", "0.9", "--batch-sizes", "none"]
    about = ["--scheme", "int8", "--kv", "kv-int8", "--text", str(text), "--out", str(out)]
    assert main(["quantize", str(folder), *about, *quick, *bound]) == 0
    return out


def test_keys_and_values_are_measured_as_they_are_kept(folder: Path) -> None:
    model, tokenizer = load_model(folder, dtype="fp32", device="cpu"), Tokenizer.load(folder)
    without = quantize(model, tokenizer, JOB)
    found = quantize(model, tokenizer, replace(JOB, kv="fp8"))
    assert found.quality.mean_kl.value > without.quality.mean_kl.value
    assert without.kv is None
    assert found.kv is not None
    assert (found.kv.dtype, found.kv.keys.shape) == (torch.float8_e4m3fn, (2, 2))


def test_the_files_hold_scales_and_the_engine_keeps_to_them(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((saved / "config.json").read_text())["quantization_config"]
    scheme = config["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"]) == (8, "int", "tensor")
    assert kv_dtype(open_checkpoint(saved)) == "int8"
    opened = open_quantized(open_checkpoint(saved))
    assert opened is not None
    scales = opened.kv_scales()
    assert len(scales) == 4
    assert all(0 < float(scale) < 1 for scale in scales.values())
    assert Engine(saved, device="cpu").recipe.kv.dtype == "int8"
    assert Engine(saved, Recipe(kv=KV(dtype="fp32")), device="cpu").recipe.kv.dtype == "fp32"
    assert main(list(generate(saved))) == 0
    ranks = task_for(saved, Recipe(parallel=Parallel(tensor=2)), "cpu")
    assert ranks.recipe.kv.dtype == "int8"


def test_transformers_finds_the_scales(saved: Path) -> None:
    pytest.importorskip("compressed_tensors")
    peer = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    opened = open_quantized(open_checkpoint(saved))
    assert opened is not None
    for name, scale in opened.kv_scales().items():
        layer = peer.get_submodule(name.rpartition(".")[0])
        assert getattr(layer, name.rpartition(".")[2]).item() == scale.item()


@pytest.mark.parametrize(
    ("scheme", "kind", "words"),
    [
        ({"num_bits": 4, "type": "int"}, UnsupportedError, "kv_cache_scheme 8 bits --kv-dtype"),
        ("fp8", UnsupportedError, "kv_cache_scheme fp8"),
        ({"num_bits": 8, "type": "posit"}, ConfigError, "kv_cache_scheme posit"),
    ],
)
def test_other_schemes_of_the_cache(
    scheme: Any,
    kind: Any,
    words: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", quantization_config=config | {"kv_cache_scheme": scheme})
    refused(capsys, kind, words, *generate(tmp_path))
    assert main(list(generate(tmp_path, "--kv-dtype", "fp32"))) == 0
