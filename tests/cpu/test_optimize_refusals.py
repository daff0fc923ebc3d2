"""What `optimize` refuses, in one line and before anything is measured; and what runs nothing."""

from __future__ import annotations

import argparse
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from local_climbs import Local
from local_climbs import command as command
from local_climbs import local as local
from local_climbs import model as model

from ridgeline.cli import main
from ridgeline.cli.arguments.options import add_flags, from_flags
from ridgeline.errors import (
    HardwareError,
    OutputError,
    RidgelineError,
    UsageError,
)
from ridgeline.ladder.processes import bench_processes
from ridgeline.ladder.reporting.folder import recipe_flags
from ridgeline.recipe import KV, Limits, Recipe


def test_a_dry_run_measures_nothing(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_processes, "Process", None)
    assert main([*command, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "first guess:" in text
    assert "weights in int8" in text
    assert main([*command, "--dry-run", "--for", "throughput", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rungs"]}
    assert rows["int8"]["applies"]
    assert rows["int8"]["predicted"]["speedup"] > 0
    assert rows["fp8"]["predicted"] is None  # a CPU only decodes it
    assert result["guess"]["predicted"]["speedup"] >= 1.0
    assert not any(str(value).startswith("int4") for value in result["guess"]["edit"].values())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        (["--device", "cuda"], HardwareError, "no GPU"),
        (["--rounds", "3"], UsageError, "--rounds is 3 at least 5"),
        (["--budget", "soon"], UsageError, "--budget 'soon' 10m"),
        (["--workload", "nosuch.csv"], UsageError, "nosuch.csv neither"),
        (["--quality", "off"], UsageError, "quality off --max-kl"),
        (["--shape", "tiny"], UsageError, "give either a model, or --shape"),
        (["--window", "1"], UsageError, "--window is 1"),
        (["--text", "none.txt"], UsageError, "no file none.txt"),
        (["--task", "hellaswag"], UsageError, "--data"),
        (["--output-tokens", "0"], UsageError, "--output-tokens is 0"),
        (["--out", "/proc/nothing"], OutputError, "cannot write /proc/nothing"),
        (["--check", "."], UsageError, "--check only the folder"),
    ],
)
def test_refusals(
    local: type[Local],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    kind: type[RidgelineError],
    words: str,
) -> None:
    refused(capsys, kind, words, *command, *more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ContextTokens,Nonsense\n1,2\n", "nonsense.csv Nonsense"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,-3,2\n", "line 2 -3"),
        ("", "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,500,2\n", "502 tokens"),
    ],
)
def test_a_workload_of_nonsense(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: str,
) -> None:
    (tmp_path / "nonsense.csv").write_text(text)
    refused(capsys, UsageError, words, *command, "--workload", str(tmp_path / "nonsense.csv"))


def test_folders_that_cannot_be_used(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "something").write_text("mine")
    refused(capsys, UsageError, "not empty --resume", *command)
    refused(capsys, UsageError, "no climb to go on with", *command, "--resume")
    refused(capsys, UsageError, "no check.json", "optimize", "--check", str(out))
    assert (out / "something").read_text() == "mine"
    shape = ["optimize", "--shape", "tiny", "--out", str(tmp_path / "o")]
    refused(capsys, UsageError, "--quality off", *shape)


def test_a_full_disk_is_one_line(
    local: type[Local],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("finished.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(source, target)

    monkeypatch.setattr(os, "replace", full)
    refused(capsys, OutputError, "finished.json No space left", *command, "--json")


def test_a_recipe_as_flags_is_that_recipe() -> None:
    recipe = Recipe(
        dtype="bf16",
        tuned=False,
        graphs=True,
        scheme="fp8",
        head="int8",
        kv=KV("fp8", 128),
        limits=Limits(None, 64),
    )
    parser = argparse.ArgumentParser()
    add_flags(parser, Recipe)
    assert from_flags(parser.parse_args(recipe_flags(recipe)), Recipe) == recipe
    assert recipe_flags(Recipe()) == []
    changed = replace(recipe, overlap=False)
    assert "--no-overlap" in recipe_flags(changed)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ttft-ms", "0"], "--ttft-ms is 0; give milliseconds above 0"),
        (["--tpot-ms", "nan"], "--tpot-ms is nan; give milliseconds above 0"),
        (["--peer-model", "m"], "--peer-model needs a --peer-url"),
        (["--peer-url", "ftp://x"], "--peer-url is 'ftp://x'; give one like http://127.0.0.1:8000"),
    ],
)
def test_bounds_that_mean_nothing(
    words: list[str], problem: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    assert problem in capsys.readouterr().err
