"""The soak (tests/soak, `make soak`) in a short form: a tiny model, seconds instead of minutes.
Times and memory are looked at in the long one alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import make_folder
from live_server import TEMPLATE
from soak.__main__ import FLAGS, soak
from soak.checks import Check, SoakResult, checked, p99, table
from soak.killing import Outage
from soak.memory import MemorySample, MemoryWatch
from soak.server_process import ServerProcess, memory_flags
from soak.traffic import GOOD_KEY, SentRequest


@pytest.mark.slow
def test_a_soak_of_seconds(tmp_path: Path) -> None:
    make_folder(tmp_path, TEMPLATE, max_position_embeddings=2048)
    flags = ("--page-size", "16", *memory_flags(300 << 20))
    result = soak(
        lambda log: ServerProcess(str(tmp_path), *FLAGS, *flags, log=log, key=GOOD_KEY),
        seconds=8.0, quiet_seconds=4.0, num_clients=24, pause_s=0.2, kill_every_s=4.0,
    )  # fmt: skip
    assert [request.problem for request in result.loud if request.problem] == []
    kinds = {request.kind.partition(":")[0] for request in result.loud}
    assert {"well-behaved", "aborted", "gone", "hostile"} <= kinds
    assert len(result.outages) == 1
    on_the_clock = ("p99", "memory", "requests a p99", "well-behaved refused")
    failed = [check for check in checked(result) if not check.is_ok]
    assert [check for check in failed if not check.name.startswith(on_the_clock)] == []


def sent(begun: float, seconds: float, **more: object) -> SentRequest:
    values = {"kind": "well-behaved", "status": 200, "is_answered": True, "is_refused": False}
    return SentRequest(begun=begun, ended=begun + seconds, **values | more)  # type: ignore[arg-type]


def result_of(**changes: object) -> SoakResult:
    """A run that kept all promises: 200 s with one kill, the engine back after three."""
    memory = MemoryWatch.__new__(MemoryWatch)
    memory.samples = [MemorySample(float(second), 1000, 2000) for second in range(200)]
    values = {
        "quiet": [sent(-1.0, 0.5)] * 150,
        "quiet_after": [sent(200.0, 0.3)] * 150,
        "loud": [sent(float(second), 0.9) for second in range(60, 200)] + [sent(39.0, 3.5)],
        "outages": [Outage(40.0, 43.0)],
        "memory": memory,
        "begun": 0.0,
        "ended": 200.0,
        "restarts": 1.0,
        "left_behind": {"pages": 0.0},
        "changed": [],
        "exit_code": 0,
    }
    return SoakResult(**values | changes)  # type: ignore[arg-type]


def failed(result: SoakResult) -> list[str]:
    return [check.name for check in checked(result) if not check.is_ok]


def test_a_run_that_kept_all_promises() -> None:
    assert failed(result_of()) == []
    assert p99(result_of().apart) == pytest.approx(0.9)
    assert len(result_of().hit) == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quiet": [sent(-1.0, 0.5, problem="no answer")] * 150}, "without an answer"),
        ({"loud": [sent(float(second), 1.1) for second in range(60, 200)]}, "not alive during"),
        ({"outages": [Outage(40.0, 42.0)]}, "alive during a kill"),
        ({"quiet": [sent(-1.0, 0.5)] * 50}, "a p99 is taken of"),
        ({"quiet_after": [sent(200.0, 0.3)] * 50}, "a p99 is taken of"),
        ({"quiet_after": [sent(200.0, 0.3, problem="none")] * 150}, "without an answer"),
        ({"restarts": 2.0}, "engine restarts"),
        ({"left_behind": {"pages": 3.0}}, "left behind"),
        ({"changed": ["The sky is"]}, "answers that changed"),
        ({"exit_code": 1}, "exit code"),
        ({"problems": ["no answer after a kill"]}, "other problems"),
    ],
)
def test_each_promise_is_checked(changes: dict[str, object], name: str) -> None:
    (broken,) = failed(result_of(**changes))
    assert name in broken


def test_refusals_count_where_nothing_was_killed() -> None:
    refused = sent(100.0, 0.1, is_answered=False, is_refused=True)
    good = result_of().loud
    (name,) = failed(result_of(loud=[*good, refused]))
    assert "refused without a kill" in name
    assert failed(result_of(loud=[*good, refused._replace(begun=41.0, ended=41.1)])) == []


def test_a_machine_that_became_slower_is_not_the_servers_fault() -> None:
    """The slower of the two quiet runs is what a request may take twice as long as."""
    slower = result_of(quiet=[sent(-1.0, 0.3)] * 150, quiet_after=[sent(200.0, 0.5)] * 150)
    assert failed(slower) == []
    (name,) = failed(result_of(quiet=[sent(-1.0, 0.3)] * 150))
    assert "not alive during a kill" in name


@pytest.mark.parametrize("who", ["server", "engine"])
def test_memory_that_grows_is_seen(who: str) -> None:
    """The engine's after the last kill alone: the one before it is another process."""
    result = result_of()
    grown = [s._replace(**{who: int(getattr(s, who) * (1 + s.time / 2000))})
             for s in result.memory.samples]  # fmt: skip
    result.memory.samples = grown
    assert failed(result) == [f"memory of the {who} grew by"]
    result.memory.samples = []
    assert "memory of the engine grew by" in failed(result)  # it was not looked at


def test_the_table_says_what_failed() -> None:
    text = table([Check("one", "3", "5", True), Check("longer name", "9 s", "5 s", False)])
    assert text.splitlines() == [
        "ok      one            3  limit 5",
        "failed  longer name  9 s  limit 5 s",
    ]
