"""Short training runs through the command line, on a tiny model and a little text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from written_text import TEXT

from ridgeline.cli import main

Capture = pytest.CaptureFixture[str]
STEPS = 6


@contextmanager
def single_thread() -> Iterator[None]:
    """Here and in processes that are started: how a sum is divided among threads changes its last
    bits, so that runs are compared that have the same number.
    """
    before, named = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)
    os.environ["OMP_NUM_THREADS"] = named or str(before)


def make_text(folder: Path) -> Path:
    path = folder / "book.txt"
    path.write_text(TEXT[:60_000])
    return path


def words(model: Path, text: Path, out: Path, *more: str) -> list[str]:
    usual = ["--sequence-length", "32", "--batch", "4", "--micro-batch", "2", "--lr", "1e-2"]
    paths = [str(model), "--data", str(text), "--out", str(out), "--device", "cpu"]
    ends = [] if {"--minutes", "--tokens", "--steps"} & set(more) else ["--steps", str(STEPS)]
    return ["train", *paths, *usual, *ends, "--warmup", "2", *more]


def trained(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def same_bytes(one: Path, other: Path) -> None:
    """That two checkpoints hold the same weights and the same optimizer's state."""
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
