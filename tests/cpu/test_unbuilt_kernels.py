"""A GPU that Triton serves, because its CUDA C++ was never built, is told so once in one line. The
GPU is made up: loading takes this CPU for one.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from ridgeline.cli import main
from ridgeline.engine import Engine
from ridgeline.engine.loading import supported
from ridgeline.kernels.extension import sources
from ridgeline.models.shapes import random_model
from ridgeline.recipe import Recipe

FUSED = Recipe(dtype="fp32", kernels="fused")
LINE = "CUDA C++ kernels are not built; "
GAIN = " int4 decoding about 1.5× as fast"


@pytest.fixture(autouse=True)
def made_up_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where its kernels would be."""
    monkeypatch.setattr(supported, "is_nvidia", lambda device: True)
    monkeypatch.setattr(supported, "find_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setattr(supported, "built_path", lambda op: tmp_path / op)
    supported._mention_once.cache_clear()
    return tmp_path


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [text for text in messages if text.startswith(LINE)]


def load(recipe: Recipe = FUSED) -> None:
    with Engine(random_model("tiny", torch.float32, "cpu"), recipe):
        pass


def test_it_is_said_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    load()
    load()
    assert lines(caplog) == [f"{LINE}`ridgeline kernels build` makes{GAIN}"]
    assert [record.levelno for record in caplog.records if LINE in record.message] == [
        logging.WARNING
    ]


def test_without_a_compiler_that_is_named_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supported, "find_nvcc", lambda: None)
    load()
    assert lines(caplog) == [f"{LINE}nvcc and `ridgeline kernels build` make{GAIN}"]


def test_nothing_is_said_where_they_are_built_or_not_wanted(
    caplog: pytest.LogCaptureFixture, made_up_gpu: Path
) -> None:
    load(Recipe(dtype="fp32", kernels="reference"))
    for op in sources():
        (made_up_gpu / op).touch()
    load()
    assert lines(caplog) == []
    (made_up_gpu / sources()[0]).unlink()
    load()
    assert len(lines(caplog)) == 1


def test_a_cpu_and_rocm_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not supported.is_nvidia("cpu")
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert not supported.is_nvidia("cuda:0")
    monkeypatch.setattr("torch.version.hip", None)
    assert supported.is_nvidia("cuda:0")


def test_a_command_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ridgeline.cli.bench.engine.measure", lambda hardware, *_: hardware)
    prompts = tmp_path / "trace.csv"
    prompts.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00.0,20,4\n")
    argv = ["bench", "engine", "--shape", "tiny", "--workload", str(prompts), "--device", "cpu"]
    assert main([*argv, "--kernels", "fused", "--json"]) == 0
    assert len(lines(caplog)) == 1
