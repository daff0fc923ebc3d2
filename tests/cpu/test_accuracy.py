"""Prediction errors kept over runs, and the intervals that follow from them."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import pytest

from ridgeline.formats import line_store
from ridgeline.formats.files import atomic_write
from ridgeline.profiling.predicting import accuracy
from ridgeline.profiling.predicting.accuracy import (
    DEFAULT_FACTOR,
    LEAST_FACTOR,
    PredictionOutcome,
    accuracy_by_area,
    accuracy_of,
    factor_of,
    interval_factor,
    known_errors,
    remember,
)


def outcome(
    predicted: float, achieved: float, area: str = "quantize", device: str = "H200"
) -> PredictionOutcome:
    return PredictionOutcome(area, "int8", predicted, achieved, device, "demo")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "predictions.jsonl"


def test_what_is_remembered_comes_back(path: Path) -> None:
    first = PredictionOutcome("fuse", "fused", 1.5, 1.4, "H200", "demo", 1.2, 1.8)
    remember([first], path)
    remember([outcome(2.0, 1.8), outcome(1.1, 1.1, "overhead", "CPU")], path)
    known = known_errors(path=path)
    assert [(each.area, each.predicted, each.achieved) for each in known.outcomes] == [
        ("fuse", 1.5, 1.4),
        ("quantize", 2.0, 1.8),
        ("overhead", 1.1, 1.1),
    ]
    assert known.outcomes[0].held is True
    assert known.outcomes[1].held is None
    assert all(each.created for each in known.outcomes)
    assert [each.area for each in known_errors("fuse", path=path).outcomes] == ["fuse"]
    assert [each.area for each in known_errors(device="CPU", path=path).outcomes] == ["overhead"]


def test_nothing_known_is_nothing_wrong(path: Path) -> None:
    assert known_errors(path=path) == accuracy.KnownAccuracy((), 0)
    remember([], path)
    assert not path.exists()


def test_the_cache_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    remember([outcome(2.0, 1.9)])
    assert len(known_errors().outcomes) == 1
    assert accuracy.store_path().is_relative_to(tmp_path / "cache")


BROKEN = [
    b"not json",
    b'{"area": "fuse"',
    b"[1, 2]",
    b"null",
    b'{"area": "fuse"}',
    b"\xff\xfe\x00",
    *(
        json.dumps(accuracy.asdict(outcome(2.0, 1.9)) | {key: value}).encode()
        for key, value in (
            ("predicted", 0),
            ("achieved", -1.0),
            ("predicted", "2"),
            ("achieved", math.nan),
            ("achieved", math.inf),
            ("low", "1"),
            ("area", 5),
            ("device", None),
        )
    ),
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_skipped_and_counted(path: Path, line: bytes) -> None:
    remember([outcome(2.0, 1.9)], path)
    with path.open("ab") as file:
        file.write(line)  # with no end, as a full disk leaves it
    remember([outcome(3.0, 2.9)], path)
    known = known_errors(path=path)
    assert [each.predicted for each in known.outcomes] == [2.0, 3.0]
    assert known.num_broken == 1


def test_the_file_is_bounded_and_keeps_the_latest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_store, "MAX_LINES", 10)
    for value in range(1, 24):
        remember([outcome(float(value), 1.0)], path)
        assert len(path.read_text().splitlines()) <= 10
    kept = [each.predicted for each in known_errors(path=path).outcomes]
    assert kept == sorted(kept)
    assert kept[-1] == 23.0
    assert len(kept) >= 5


def _remember_many(path: Path, area: str, barrier: Barrier) -> None:
    barrier.wait()
    for value in range(1, 41):
        remember([outcome(float(value), 1.0, area)], path)
        time.sleep(0.001)


@contextmanager
def _slow_write(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[Any]:
    time.sleep(0.03)  # in which the other writer could add what is then lost
    with atomic_write(path, mode) as file:
        yield file


def test_two_writers_lose_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 lines the 61st makes it keep 30, and 19 follow: nothing in between is missing."""
    monkeypatch.setattr(line_store, "MAX_LINES", 60)
    monkeypatch.setattr(line_store, "atomic_write", _slow_write)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    workers = [
        context.Process(target=_remember_many, args=(path, name, barrier)) for name in ("a", "b")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    known = known_errors(path=path)
    assert known.num_broken == 0
    assert len(known.outcomes) == 49
    for area in ("a", "b"):
        values = [each.predicted for each in known.outcomes if each.area == area]
        assert values == [float(40 - back) for back in range(len(values))][::-1]


def test_a_place_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    remember([outcome(2.0, 1.9)], tmp_path / "file" / "predictions.jsonl")
    assert "not remembered" in caplog.text
    (tmp_path / "folder").mkdir()
    assert known_errors(path=tmp_path / "folder").outcomes == ()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_an_outcome_is_a_positive_number(bad: float) -> None:
    with pytest.raises(ValueError, match="predicted is"):
        outcome(bad, 1.0)
    with pytest.raises(ValueError, match="achieved is"):
        outcome(1.0, bad)


def test_errors_and_what_is_close() -> None:
    assert outcome(2.2, 2.0).error == pytest.approx(0.1)
    assert outcome(1.8, 2.0).error == pytest.approx(-0.1)
    assert outcome(2.4, 2.0).is_close
    assert outcome(1.6, 2.0).is_close
    assert not outcome(2.41, 2.0).is_close
    assert not outcome(1.59, 2.0).is_close


def test_the_factor_holds_four_of_five() -> None:
    """Of n distances the one at rank ⌈0.8 (n + 1)⌉; up and down count alike."""
    assert factor_of([outcome(1.0, 1.0)] * 3) is None  # rank 4 of 3
    four = [outcome(1.0, 1.1), outcome(1.2, 1.0), outcome(1.0, 1.3), outcome(1.4, 1.0)]
    assert factor_of(four) == pytest.approx(1.4)
    nine = [outcome(1.0, 1.0 + step / 10) for step in range(1, 10)]
    assert factor_of(nine) == pytest.approx(1.8)  # rank 8
    assert factor_of([outcome(2.0, 2.0)] * 5) == LEAST_FACTOR


def test_where_a_factor_comes_from(path: Path) -> None:
    default = interval_factor("quantize", "H200", path)
    assert (default.factor, default.num_outcomes) == (DEFAULT_FACTOR, 0)
    assert "default" in default.basis
    assert "no prediction" in default.basis
    remember([outcome(1.0, 1.5, device="CPU")] * 4, path)
    elsewhere = interval_factor("quantize", "H200", path)
    assert elsewhere.factor == pytest.approx(1.5)
    assert elsewhere.num_outcomes == 4
    remember([outcome(1.1, 1.0)] * 3, path)
    assert interval_factor("quantize", "H200", path).num_outcomes == 7
    remember([outcome(1.1, 1.0)], path)
    here = interval_factor("quantize", "H200", path)
    assert here.factor == pytest.approx(1.1)
    assert here.num_outcomes == 4
    assert "H200" in here.basis
    assert interval_factor("fuse", "H200", path).num_outcomes == 0


def test_accuracy_by_area() -> None:
    errors = [outcome(1.1, 1.0), outcome(0.9, 1.0), outcome(1.5, 1.0)]
    found = accuracy_of(errors, "quantize")
    assert found.num == 3
    assert found.median_error == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.1)
    assert found.share_close == pytest.approx(2 / 3)
    assert found.share_held is None
    held = PredictionOutcome("fuse", "fused", 1.5, 1.4, "H200", "demo", 1.2, 1.8)
    missed = PredictionOutcome("fuse", "fused", 1.5, 1.0, "H200", "demo", 1.2, 1.8)
    by_area = accuracy_by_area([*errors, held, missed])
    assert [each.area for each in by_area] == ["quantize", "fuse"]
    assert by_area[1].share_held == 0.5
    assert accuracy_by_area([]) == []
