"""`ridgeline tune serve`: recipes by scripted speeds, each beside the defaults; what changes
answers too much is given up; a search that is stopped goes on; bad input gets one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from local_climbs import TRACE, Local, local, model
from train_runs import Capture

from ridgeline.cli import main
from ridgeline.engine.loading.switches import check_switches, switches
from ridgeline.errors import INTERRUPTED_EXIT_CODE, UnsupportedError, UsageError
from ridgeline.kernels import autotune
from ridgeline.ladder.recipe_search.choices import changes_answers, edit_of, parse_recipe_space
from ridgeline.ladder.recipe_search.trials import DEFAULTS
from ridgeline.recipe import Recipe, dotted_values

__all__ = ["local", "model"]

Speed = Callable[[dict[str, Any]], float]


def speed(spec: dict[str, Any]) -> float:
    """Pages of 16 tokens help, so do batches of 8, and 8-bit pages most."""
    recipe = spec["recipe"]
    times = 1.5 if recipe["limits"]["max_batch"] == 8 else 1.0
    times *= 1.2 if recipe["kv"]["page_size"] == 16 else 1.0
    return 20.0 * times * (2.0 if recipe["kv"]["dtype"] == "int8" else 1.0)


@pytest.fixture
def search(
    model: Path, tmp_path: Path, local: type[Local], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr(Local, "speed", staticmethod(speed))
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "text.txt").write_text("A hill is lower than a mountain, and so on. " * 8)
    words = ["tune", "serve", str(model), "--out", str(tmp_path / "study"), "--device", "cpu"]
    words += ["--workload", str(tmp_path / "trace.csv"), "--text", str(tmp_path / "text.txt")]
    words += ["--window", "60", "--max-ppl-increase", "0.9", "--over", "max-batch=2,4,8"]
    return [*words, "--over", "page-size=16,64"]


def found(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.slow
def test_the_fastest_recipe_is_left(search: list[str], tmp_path: Path, capsys: Capture) -> None:
    document = found(capsys, *search, "--runs", "6")
    assert document["best"]["point"] == {"max-batch": 8, "page-size": 16}
    assert document["best"]["losses"][-1] == pytest.approx(1 / 1.8, rel=0.01)
    assert document["is_kept"]
    recipe = Recipe.load(tmp_path / "study" / "recipe.json")
    assert (recipe.limits.max_batch, recipe.kv.page_size) == (8, 16)
    page = (tmp_path / "study" / "report.html").read_text()
    assert "time as a share of the defaults" in page
    assert "kept." in page
    assert document["answer"].startswith("max-batch 8, page-size 16: 1.8")
    assert document["answer"] in page
    assert main([*search, "--runs", "6", "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"--recipe {tmp_path / 'study' / 'recipe.json'}" in out


@pytest.mark.slow
def test_what_is_no_faster_leaves_the_defaults(
    search: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Local, "speed", staticmethod(lambda spec: 20.0))
    document = found(capsys, *search, "--runs", "3")
    assert not document["is_kept"]
    assert "the defaults stay" in document["note"].lower()
    assert document["answer"].startswith("The defaults stay; of what was tried, max-batch ")
    assert not (tmp_path / "study" / "recipe.json").exists()


@pytest.mark.slow
def test_answers_are_judged(search: list[str], capsys: Capture) -> None:
    """8-bit pages are fastest, and change answers: with no change allowed they are given up."""
    argv = [*search, "--over", "kv-dtype=fp32,int8", "--max-kl", "0", "--runs", "8"]
    document = found(capsys, *argv)
    whole = [each for each in document["trials"] if len(each["losses"]) == 2]
    rounded = [each for each in whole if each["point"]["kv-dtype"] == "int8"]
    assert rounded
    assert all("KL" in each["problem"] for each in rounded)
    assert document["best"]["point"]["kv-dtype"] == "fp32"


@pytest.mark.slow
def test_a_search_that_is_stopped_goes_on(
    search: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(spec: dict[str, Any]) -> float:
        if Local.num_rounds > 20:
            raise KeyboardInterrupt
        return speed(spec)

    monkeypatch.setattr(Local, "speed", staticmethod(stopped))
    assert main([*search, "--runs", "6", "--json"]) == INTERRUPTED_EXIT_CODE
    before = json.loads(capsys.readouterr().out)["trials"]
    monkeypatch.setattr(Local, "speed", staticmethod(speed))
    document = found(capsys, *search, "--runs", "6", "--resume")
    measured = [each for each in before if each["losses"]]
    assert 0 < len(measured) < len(document["trials"])
    for old, new in zip(measured, document["trials"], strict=False):
        assert new["losses"][: len(old["losses"])] == old["losses"]
    assert document["best"]["point"] == {"max-batch": 8, "page-size": 16}
    refused(
        capsys, UsageError, "study of something else goal 'latency', was 'throughput'",
        *search, "--runs", "6", "--resume", "--for", "latency",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--over", "kv-dtyp=int8"], "--over kv-dtyp did you mean 'kv-dtype'"),
        (["--over", "max-context=64,128"], "--over max-context no flag of"),
        (["--over", "scheme=in8"], "--over scheme 'in8' is unknown"),
        (["--over", "dtype=fp64"], "--over dtype fp64"),
        (["--over", "tiles.rms_norm=0..99"], "a place is below 64"),
        (["--over", "tiles.RMS=0,1"], "--over tiles.RMS OP=PLACE"),
        (["--over", "max-batch=2"], "max-batch is to be searched twice"),
        (["--runs", "0.1"], "too small for one trial"),
        (["--quality", "off"], "--quality off"),
    ],
)
def test_searches_that_make_no_sense(
    search: list[str], tmp_path: Path, capsys: Capture, more: list[str], words: str
) -> None:
    runs = [] if "--runs" in more else ["--runs", "4"]
    refused(capsys, UsageError, words, *search, *runs, *more)
    assert not (tmp_path / "study" / "journal.jsonl").exists()


def test_a_wrong_model_leaves_no_folder(tmp_path: Path, capsys: Capture) -> None:
    argv = ["tune", "serve", str(tmp_path / "none"), "--over", "max-batch=1,2", "--runs", "2"]
    assert main([*argv, "--out", str(tmp_path / "study")]) != 0
    assert not (tmp_path / "study").exists()
    capsys.readouterr()


# Kernel tiles


def test_tiles_are_places_in_one_field() -> None:
    space = parse_recipe_space(["tiles.rms_norm=0..3", "tiles.sampling=0,1", "max-batch=4"])
    assert space.names == ["tiles.rms_norm", "tiles.sampling", "max-batch"]
    edit = edit_of({"tiles.rms_norm": 2, "tiles.sampling": 0, "max-batch": 4})
    assert edit == {"limits.max_batch": 4, "tiles": "rms_norm=2"}
    assert edit_of({"tiles.rms_norm": 0})["tiles"] is None
    assert autotune.parse_places("rms_norm=2,sampling=1") == {"rms_norm": 2, "sampling": 1}
    defaults = dotted_values(DEFAULTS.recipe)
    assert not changes_answers(edit, defaults)
    assert changes_answers({"scheme": "int8"}, defaults)


def test_tiles_are_taken_for_the_time_of_a_step() -> None:
    with switches(Recipe(tiles="rms_norm=2"))():
        assert autotune._places == [{"rms_norm": 2}]
    assert autotune._places == []
    with pytest.raises(UnsupportedError, match="the device is a CPU"):
        check_switches(Recipe(tiles="rms_norm=2"), "cpu")
    with pytest.raises(UnsupportedError, match="remove --no-tuned"):
        check_switches(Recipe(tiles="rms_norm=2", tuned=False), "cuda:0")
    for wrong in ("rms_norm", "rms_norm=", "=1", "rms_norm=-1", "rms norm=1"):
        with pytest.raises(UsageError, match="OP=PLACE"):
            Recipe(tiles=wrong)
