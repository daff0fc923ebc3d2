"""`ridgeline optimize` from the command line to the folder it leaves, and its guard. Workers run in
this process with speeds that are scripted by state: all else is real.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from local_climbs import NO_GUESS, TOGETHER, Local, usual_speed
from local_climbs import command as command
from local_climbs import local as local
from local_climbs import model as model

from ridgeline.cli import main
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe as recipe_beside
from ridgeline.errors import (
    INTERRUPTED_EXIT_CODE,
)
from ridgeline.hardware.facts import Ceiling
from ridgeline.ladder.climbing import climb
from ridgeline.ladder.guessing.answer import FirstAnswer
from ridgeline.ladder.guessing.earlier import known_answers, remember_answer
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.summary import changed_fields
from ridgeline.ladder.rungs import batching
from ridgeline.quantization.linear import schemes_of
from ridgeline.records import Record


def test_a_climb_leaves_a_folder_that_runs_as_its_recipe_says(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Local, "runs_curves", True)
    out = tmp_path / "out"
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # --json tells nothing besides
    said = json.loads(printed.out)
    found = Climb.from_json(json.loads((out / "climb.json").read_text()))
    assert found.to_json() == Climb.from_json(said["climb"]).to_json()
    assert {rung.name: rung.status for rung in found.rungs} == {
        "int8": "kept",
        "kv-int8": "dropped",
    }
    assert found.total is not None
    assert found.total.value == pytest.approx(2.0, rel=0.01)  # over the engine's defaults
    assert found.before.loop == "engine"
    assert [step.name for step in found.ladder] in (["fused", "int8"], ["engine", "int8"])
    assert found.over_plain == pytest.approx(4.0, rel=0.01)
    assert found.plain is not None  # the two were run beside each other
    assert found.over_plain_words == "measured in 3 rounds (4.00 to 4.01×)"
    assert found.ladder_is_measured
    assert [point.batch for point in found.after.curve][:2] == [1, 2]
    assert "of the defaults" in found.headline
    assert "rates are of the whole workload, 5 times on each side" in found.notes
    assert {"loading", "rounds", "quality"} <= found.time_ledger.keys()
    assert sum(found.time_ledger.values()) <= found.seconds
    int8 = found.rungs[0]
    assert int8.quality is not None
    assert int8.quality.problem is None
    assert int8.quality.num_tokens > 100
    assert found.serve_command == ("ridgeline", "serve", str(out))
    changed = {row.name for row in changed_fields(found)}
    assert not changed & {"limits.max_context", "limits.memory_share"}  # those were of measuring
    assert [each.rung for each in Local.remembered] == ["int8", "kv-int8"]
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "card.svg").read_text().startswith("<svg ")
    records = json.loads((out / "records.json").read_text())["records"]
    assert {"before", "after", "int8"} <= {Record.from_json(r).name.split("-")[-1] for r in records}
    recipe = recipe_beside(out)
    assert recipe is not None
    assert recipe.limits.max_batch == 128  # nothing that was chosen is left open
    assert recipe.kernels == ("fused" if found.ladder[0].name == "fused" else "reference")
    with Engine(out, recipe, device="cpu", num_pages=8) as engine:
        assert {scheme.name for scheme in schemes_of(engine.model).values()} == {"int8"}
        assert engine.recipe.kv.dtype == "fp32"


def test_what_is_not_quantized_is_a_link_to_the_original(
    local: type[Local], command: list[str], model: Path, tmp_path: Path
) -> None:
    Local.speed = staticmethod(  # type: ignore[assignment]
        lambda spec: 10.0 if spec["loop"] == "naive" or spec["recipe"]["scheme"] else 20.0
    )
    assert main([*command, "--json"]) == 0
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == (model / "model.safetensors").resolve()
    assert not (tmp_path / "out" / "recipe.json").is_symlink()
    with Engine(tmp_path / "out", device="cpu", num_pages=8) as engine:
        assert engine.generate(["hello"])[0].status == "finished"


def test_the_report_says_why_it_is_not_at_the_limit(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the steps of the answer as they were looked at, by the ceilings of the machine."""
    rates = {"read_bandwidth": 1e11, "matrix_fp32": 1e12, "matrix_bf16": 1e12}
    ceilings = {key: Ceiling(value, "", "measured") for key, value in rates.items()}
    monkeypatch.setattr(
        "ridgeline.ladder.order.measure",
        lambda hardware, only, progress: replace(hardware, ceilings=ceilings),
    )
    assert main(command) == 0
    climb = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert {part.phase for part in climb.gap} <= {"prefill", "decode"}
    assert 0.5 < sum(part.share for part in climb.gap) < 1  # a tiny model waits most of the time
    shown = " ".join(capsys.readouterr().out.split())
    assert "The largest parts of the rest are" in shown
    assert "requests at once instead of" in shown


def test_without_a_terminal_there_is_a_line_for_each_thing_it_does(
    local: type[Local], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--budget", "9m"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("measuring where it begins: the engine in" in line for line in lines)
    tried = [line for line in lines if "weights in int8" in line]
    assert len(tried) == 1, lines
    assert re.fullmatch(
        r" *0:\d\d of 9:00  weights in int8.*; best 20 tokens/s, 1.00× .*", tried[0]
    )
    assert re.search(
        r"before and after, in turns; best 40(.\d)? tokens/s, 2.00× the def", lines[-3]
    )
    assert "the plain loop beside the answer" in lines[-2]
    assert "the ladder from the plain loop" in lines[-1]


def test_outside_the_bound_it_is_dropped(
    local: type[Local], command: list[str], tmp_path: Path
) -> None:
    assert main([*command, "--max-kl", "0", "--json"]) == 0
    found = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert found.rungs[0].status == "dropped"
    assert "allowed is 0" in found.rungs[0].reason
    assert found.headline.startswith("The defaults are the fastest that was found")
    assert "rates are of the whole workload, once on each side" in found.notes
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]


def test_what_is_slower_on_the_whole_workload_is_not_left(
    local: type[Local], command: list[str], model: Path, tmp_path: Path
) -> None:
    """Faster in rounds, and slower in the last runs, which are of the files that were left."""
    local.speed = staticmethod(lambda spec: 15.0 if spec["folder"] else usual_speed(spec))
    assert main([*command, "--json"]) == 0
    result = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert result.headline.startswith("The defaults are the fastest that was found")
    assert result.kept == []
    assert any("came to 0.75x of the defaults" in note for note in result.notes)
    assert result.after.figures == result.before.figures
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.resolve() == (model / "model.safetensors").resolve()


def test_the_next_climb_begins_with_the_answer_of_this_one(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(climb, "remember_answer", remember_answer)
    monkeypatch.setattr(FirstAnswer, "together", TOGETHER)
    monkeypatch.setattr("ridgeline.ladder.guessing.answer.first_guess", lambda *_: NO_GUESS)
    assert main([*command, "--json"]) == 0
    (first,) = known_answers()
    assert (dict(first.edit), first.first_was_last) == ({"scheme": "int8"}, False)
    assert first.speedup == pytest.approx(2.0, rel=0.01)
    command[command.index("--out") + 1] = str(tmp_path / "second")
    assert main([*command, "--json"]) == 0
    capsys.readouterr()
    result = Climb.from_json(json.loads((tmp_path / "second" / "climb.json").read_text()))
    assert (result.rungs[0].name, result.rungs[0].status) == ("first-guess", "kept")
    assert result.rungs[0].edit == {"scheme": "int8"}
    assert any("an earlier climb" in note for note in result.notes)
    second = known_answers()[1]
    assert (second.first_was_last, second.from_earlier) == (True, True)
    assert main(["report", "accuracy"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of 2 climbs, 1 ended with what was tried first (1 began with" in text


def test_outcomes_of_a_busy_machine_are_not_remembered(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it gained is told with the words that a wide interval deserves."""
    noise = cycle([1.0, 1.5, 2.0])

    def busy(spec: dict[str, Any]) -> float:
        return usual_speed(spec) ** 2 * next(noise)  # gains are large enough to show

    Local.speed = staticmethod(busy)  # type: ignore[assignment]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    written = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert written.total is not None
    assert written.total.high > 1.2 * written.total.low
    assert re.match(
        r"About [\d.]+× the speed of the defaults, between [\d.]+ and [\d.]+×: ", written.headline
    )
    assert written.headline in shown
    assert any("not remembered" in note for note in written.notes)
    assert Local.remembered == []


def test_ctrl_c_leaves_the_best_so_far_and_it_goes_on(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopping(spec: dict[str, Any]) -> float:
        if spec["recipe"]["kv"]["dtype"] == "int8":
            raise KeyboardInterrupt
        return usual_speed(spec)

    Local.speed = staticmethod(stopping)  # type: ignore[assignment]
    assert main([*command, "--json"]) == INTERRUPTED_EXIT_CODE
    found = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert [rung.status for rung in found.rungs] == ["kept", "not reached"]
    assert not found.ladder_is_measured  # there was no time: predicted
    assert found.plain is None
    assert any("Ctrl-C" in note for note in found.notes)
    assert (tmp_path / "out" / "report.html").is_file()
    assert recipe_beside(tmp_path / "out").scheme == "int8"  # type: ignore[union-attr]
    with Engine(tmp_path / "out", device="cpu", num_pages=8) as engine:
        assert schemes_of(engine.model)
    Local.speed = staticmethod(usual_speed)
    capsys.readouterr()
    Local.remembered.clear()
    Local.answers.clear()
    Local.num_rounds = 0
    assert main([*command, "--resume", "--json"]) == 0
    assert [each.rung for each in Local.remembered] == ["kv-int8"]  # the others were before
    found = Climb.from_json(json.loads(capsys.readouterr().out)["climb"])
    assert [rung.status for rung in found.rungs] == ["kept", "dropped"]
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()


def test_a_draft_model_is_a_rung(
    local: type[Local],
    model: Path,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model drafts for itself here; what it was told to be is in the recipe that is left."""
    draft = next(rung for rung in batching.RUNGS if rung.name == "draft-model")
    monkeypatch.setattr(climb, "MOVES", (draft,))

    def faster_with_drafts(spec: dict[str, Any]) -> float:
        return usual_speed(spec) * (1 + (spec["recipe"]["speculation"]["method"] == "draft"))

    Local.speed = staticmethod(faster_with_drafts)  # type: ignore[assignment]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "A hill is lower"}\n' * 2)
    command[command.index("--workload") + 1] = str(tmp_path / "prompts.jsonl")
    command += ["--output-tokens", "8", "--json"]
    assert main([*command, "--draft-model", str(model)]) == 0
    said = json.loads(capsys.readouterr().out)["climb"]
    assert [rung["status"] for rung in said["rungs"]] == ["kept"]
    saved = recipe_beside(tmp_path / "out")
    assert saved is not None
    assert saved.speculation.draft_model == str(model.resolve())
    command[command.index("--out") + 1] = str(tmp_path / "other")
    assert main([*command, "--draft-model", str(tmp_path / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err
