"""Our engine under traffic over time, as it ran on the H200, beside the same requests simulated:
errors may not get worse. The traces are drawn, so that anybody simulates the same ones.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_runs import Capture

from ridgeline.cli.main import main
from ridgeline.errors import UsageError
from ridgeline.planning.validating.drawn_traces import TRACES, drawn_trace
from ridgeline.planning.validating.own_runs import OwnRow, judge_own, own_records

RESULTS = Path(__file__).parents[2] / "results"
# The largest error of a figure that is wanted: TPOT, mean TTFT, TTFT p99, tokens/s.
WANTED = (0.06, 0.12, 0.20, 0.06)


@pytest.fixture(scope="module")
def rows() -> list[OwnRow]:
    return [row for record in own_records(RESULTS) for row in judge_own(record)]


def test_conversations_are_as_they_were(rows: list[OwnRow]) -> None:
    """At a load that is carried, and at more than twice as much."""
    chats = [row for row in rows if row.point.trace == "chat" and row.subject.endswith("bf16")]
    assert len(chats) >= 2
    for row in chats:
        for error, wanted in zip(row.errors, WANTED, strict=True):
            assert abs(error) <= wanted, row.words


def test_documents_take_as_long_a_token(rows: list[OwnRow]) -> None:
    """Beginnings are shared. First tokens of that run waited for kernels to compile."""
    (row,) = [row for row in rows if row.point.trace == "documents" and "bf16" in row.subject]
    assert abs(row.errors[0]) <= WANTED[0], row.words


def test_what_needs_a_file_says_so(rows: list[OwnRow], capsys: Capture, tmp_path: Path) -> None:
    missing = [row for row in rows if row.point.trace not in TRACES]
    assert all(row.words.endswith(f"needs the file {row.point.trace}") for row in missing)
    for record in RESULTS.glob("traces-*.json"):
        shutil.copy(record, tmp_path)
    assert main(["plan", "--validate", "--points", str(tmp_path), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["num"] == len(rows)
    assert document["num_predicted"] == len(rows) - len(missing)
    assert len(document["refused"]) == len({row.subject for row in missing})


def test_another_trace_under_the_same_name_is_refused() -> None:
    record = own_records(RESULTS)[0]
    about = json.loads(record.notes[1])
    note = json.dumps(about | {"prompt_tokens": about["prompt_tokens"] + 1})
    changed = replace(record, notes=(record.notes[0], note))
    with pytest.raises(UsageError, match="another now"):
        list(judge_own(changed))


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_drawn_the_same_each_time(name: str) -> None:
    trace = drawn_trace(name, 300, 10.0)
    assert trace == drawn_trace(name, 300, 10.0)
    assert trace != drawn_trace(name, 300, 10.0, seed=1)
    assert trace.duration_s == pytest.approx(30, rel=0.25)
    shared = trace.ideal_hit_rate()
    assert (0.5 < shared < 0.95) if name == "documents" else not shared


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean"):
        drawn_trace("chats", 3, 1.0)
