"""What earlier climbs on this machine came to, and how the next one begins with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from h200_jobs import MANY, filled_of, job_of, without_a_gpu

from ridgeline.cli import main
from ridgeline.ladder.guessing.answer import FirstAnswer, default_states
from ridgeline.ladder.guessing.earlier import (
    EarlierAnswer,
    first_answers,
    known_answers,
    nearest_answer,
    remember_answer,
    store_path,
)
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.ladder.searching.together import GUESS
from ridgeline.recipe import Recipe

ANSWER = EarlierAnswer(
    "NVIDIA H200", "a model", "throughput", False, 200.0, 300.0, 1000.0,
    {"scheme": "fp8", "limits.max_batch": 2048}, 1.6, first_was_last=True, first_share=1.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    without_a_gpu(monkeypatch)
    return tmp_path


def test_an_answer_comes_back() -> None:
    remember_answer(ANSWER)
    (known,) = known_answers()
    assert replace(known, created="") == ANSWER
    assert known.created


@pytest.mark.parametrize(
    "change",
    [{"device": "other"}, {"model": "other"}, {"goal": "latency"}, {"quality": True},
     {"prompt_tokens": 500.0}, {"concurrency": 100.0}],
)  # fmt: skip
def test_only_a_like_climb_is_begun_with(change: dict[str, Any]) -> None:
    assert nearest_answer([ANSWER], like=replace(ANSWER, **change)) is None
    assert nearest_answer([ANSWER], like=replace(ANSWER, output_tokens=400.0)) == ANSWER


def test_the_most_like_and_of_equals_the_latest() -> None:
    near, later = replace(ANSWER, prompt_tokens=190.0), replace(ANSWER, speedup=1.7)
    assert nearest_answer([ANSWER, later, near], like=ANSWER) == later


@pytest.mark.parametrize("line", [b"{", b"null", b"[]", b'{"device": 3}', b"edit", b"speedup"])
def test_a_line_that_cannot_be_read_is_skipped(line: bytes) -> None:
    remember_answer(ANSWER)
    document = json.loads(store_path().read_text())
    if line == b"edit":
        line = json.dumps(document | {"edit": {"no.such": 1}}).encode()
    if line == b"speedup":
        line = json.dumps(document | {"speedup": -1.0}).encode()
    with store_path().open("ab") as file:
        file.write(line + b"\n")
    remember_answer(ANSWER)
    assert len(known_answers()) == 2


def observed(filled: Recipe) -> Any:
    return SimpleNamespace(filled=filled)


def test_a_climb_begins_with_what_an_earlier_one_came_to() -> None:
    """Every field of it, also what no change alone leads to; and says so."""
    job = job_of("llama-3.1-8b", MANY)
    first = FirstAnswer(job)
    remember_answer(replace(first.like, edit=ANSWER.edit))
    together = first.together(default_states()[0], observed(filled_of(job)))
    assert {n: v for _, own in together.parts for n, v in own.items()} == ANSWER.edit
    assert [rung.name for rung, _ in together.parts] == ["fp8", "rest"]
    assert "earlier climb" in together.reason
    assert first.notes


def test_what_no_change_leads_to_is_judged_where_it_may_change_answers() -> None:
    """Groups of 32 are not offered where those of 64 fit; limits alone change nothing."""
    job = job_of("llama-3.1-8b", MANY, quality=True)
    first = FirstAnswer(job)
    for edit, changes in (({"scheme": "int4-g32"}, True), ({"limits.max_batch": 4096}, False)):
        remember_answer(replace(first.like, edit=edit))
        ((rung, own),) = first.together(default_states()[0], observed(filled_of(job))).parts
        assert (rung.name, own, rung.changes_answers) == ("rest", edit, changes)


def test_an_earlier_answer_that_does_not_fit_is_not_begun_with() -> None:
    """On a device of the same name with less memory: weights in fp8 are too large."""
    job = job_of("llama-3.1-8b", MANY, memory=8 << 30)
    first = FirstAnswer(job)
    remember_answer(replace(first.like, edit=ANSWER.edit))
    together = first.together(default_states()[0], observed(filled_of(job)))
    assert "earlier" not in together.reason
    assert first.notes == []


def test_what_a_climb_came_to() -> None:
    job = job_of("llama-3.1-8b", MANY)
    first = FirstAnswer(job)

    def kept(name: str, edit: dict[str, Any], gain: float) -> RungOutcome:
        speedup = Speedup(gain, gain, gain, (1.0,), (gain,))
        return RungOutcome(name, "quantize", name, edit, "kept", "", achieved=speedup)

    outcomes = [
        kept(GUESS, {"scheme": "fp8", "limits.max_batch": 1024}, 1.5),
        kept("without-larger-batch", {"limits.max_batch": 512}, 1.1),
    ]
    progress: Any = SimpleNamespace(outcomes=outcomes, start_observation=observed(filled_of(job)))
    answer = first.came_to(progress)
    assert answer.edit == {"scheme": "fp8"}
    assert answer.speedup == pytest.approx(1.65)
    assert not answer.first_was_last
    assert answer.first_share == pytest.approx(1 / 1.1)
    progress.outcomes = outcomes[:1]
    assert first.came_to(progress).first_was_last


def test_report_accuracy_tells_of_first_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_answers([]) is None
    assert main(["report", "accuracy"]) == 0
    assert "first answers" not in capsys.readouterr().out
    remember_answer(ANSWER)
    remember_answer(replace(ANSWER, first_was_last=False, first_share=0.9, from_earlier=True))
    assert main(["report", "accuracy"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of 2 climbs, 1 ended with what was tried first (1 began with" in text
    assert "95% of the final speed" in text
    assert main(["report", "accuracy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_answers"]["num"] == 2
