"""`optimize` with a latency bound and with a peer, from the command line to what it leaves. Workers
run in this process; in the tests that are not slow, speeds and rates are scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from fake_endpoint import FakeEndpoint
from live_server import LiveServer, live_server
from local_climbs import Local
from local_climbs import command as command
from local_climbs import local as local
from local_climbs import model as model

from ridgeline.cli import main, optimize
from ridgeline.engine.loading.saved import saved_recipe as recipe_beside
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, OfflineError, RequestError
from ridgeline.ladder.climbing import climb
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.held_rate import LevelTimes
from ridgeline.ladder.processes import bench_processes

BOUNDS = ("--ttft-ms", "60000", "--tpot-ms", "60000")
SHORT = LevelTimes(proof_s=2.0, probe_s=1.0, search_s=3.0)


class Rated(Local):
    """Its rates are scripted too: those of a recipe with fewer tokens a step are higher."""

    num_kept = 197  # of 200 requests, that keep the bound

    def answered(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do not in ("highest_rate", "prove"):
            return super().answered(do, **arguments)
        limits = self.specs[arguments["seat"]]["recipe"]["limits"]
        rate = 3.1 if limits["token_budget"] == 256 else 2.4
        if do == "highest_rate":
            values = {"rate": rate, "failed_rate": 1.05 * rate, "late_tokens": 0.2, "batch": 9.0}
            return values | {"is_sure": True, "words": "searched", "num_rates": 5}
        assert arguments["rate"] == rate
        assert 60.0 <= arguments["seconds"] < 61.0
        return {
            "rate": rate,
            "seconds": 60.1,
            "num_requests": 200,
            "num_kept": Rated.num_kept,
            "first_token_p50_s": 0.1,
            "first_token_p99_s": 0.4,
            "per_token_p50_s": 0.02,
            "per_token_p99_s": 0.04,
        }


def climbed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["climb"]
    return result


def test_the_recipe_that_holds_the_highest_rate_is_left(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer is int8, and holds no more than the defaults; smaller steps do."""
    monkeypatch.setattr(bench_processes, "Process", Rated)
    result = climbed(capsys, *command, "--ttft-ms", "500", "--tpot-ms", "50")
    levels = result["levels"]
    assert [each["name"] for each in levels["tried"]] == [
        "the defaults", "the answer", "half the token budget", "at most 4 requests at once",
    ]  # fmt: skip
    assert levels["chosen"] == "half the token budget"
    assert levels["bound"] == {"ttft_s": 0.5, "tpot_s": 0.05}
    assert levels["tried"][2]["proof"]["first_token_p99_s"] == 0.4
    assert "at random (Poisson): workload trace has no arrival times" in levels["arrivals"]
    recipe = recipe_beside(tmp_path / "out")
    assert recipe is not None
    assert recipe.limits.token_budget == 256
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Holds 3.1 requests/s within TTFT 500 ms and TPOT 50 ms (60 s shown); the " in page
    assert "proving the highest rate" in result["time_ledger"]
    names = [
        each["name"]
        for each in json.loads((tmp_path / "out" / "records.json").read_text())["records"]
    ]
    assert any(name.endswith("rate-of-half-the-token-budget") for name in names)


def test_the_guard_proves_the_rate_again(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_processes, "Process", Rated)
    climbed(capsys, *command, "--ttft-ms", "500", "--tpot-ms", "50")
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--quality", "off"]
    assert main(check) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at 3.1 requests/s for 60 s 98.5% of 200 requests keep TTFT 500 ms and TPOT" in shown
    monkeypatch.setattr(Rated, "num_kept", 174)  # 87%, which may be chance where 90% must
    assert main([*check, "--json"]) == 0
    monkeypatch.setattr(Rated, "num_kept", 140)
    capsys.readouterr()
    assert main([*check, "--json"]) == CHECK_FAILED_EXIT_CODE
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["value"] == pytest.approx(1.0, rel=0.01)
    assert result["proof"]["num_kept"] == 140
    assert result["problems"] == [
        "at 3.1 requests/s for 60 s 70.0% of 200 requests keep TTFT 500 ms and TPOT 50 ms; "
        "90% must: the rate is not held any more"
    ]
    # On a machine that is busier than it was then, it is told and fails nothing.
    monkeypatch.setattr(Control, "sample", lambda self: 60.0)
    assert main([*check, "--json"]) == 0
    remarks = json.loads(capsys.readouterr().out)["remarks"]
    assert any("the rate is not held any more" in remark for remark in remarks)


def test_the_guard_of_defaults_that_hold_the_rate(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There were no rounds of two recipes; the rate is what can fall."""
    monkeypatch.setattr(bench_processes, "Process", Rated)
    monkeypatch.setattr(climb, "MOVES", ())
    result = climbed(capsys, *command, "--ttft-ms", "500")
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu"]
    assert main(check) == 0
    assert "98.5% of 200 requests" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(Rated, "num_kept", 100)
    assert main(check) == CHECK_FAILED_EXIT_CODE
    assert result["levels"]["chosen"] is not None


@pytest.mark.slow
def test_rates_of_real_engines(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A minute is kept by all; a microsecond by none."""
    monkeypatch.setattr(optimize, "climb_model", partial(climb.climb_model, times=SHORT))
    times = ("46.680", "46.780", "46.980")
    lines = [f"2023-11-16 18:15:{time},16,8" for time in times]
    (tmp_path / "trace.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    )
    result = climbed(capsys, *command, *BOUNDS)
    levels = result["levels"]
    assert levels["arrivals"].startswith("as in the trace")
    chosen = next(each for each in levels["tried"] if each["name"] == levels["chosen"])
    assert chosen["rate"] > 1.0
    proof = chosen["proof"]
    assert proof["seconds"] >= SHORT.proof_s
    assert proof["num_kept"] / proof["num_requests"] >= 0.9
    assert proof["num_requests"] > 3  # the trace came again
    assert 0 < proof["first_token_p50_s"] <= proof["first_token_p99_s"]
    command[command.index("--out") + 1] = str(tmp_path / "other")
    result = climbed(capsys, *command, "--tpot-ms", "0.001")
    assert result["levels"]["chosen"] is None
    page = (tmp_path / "other" / "report.html").read_text()
    assert "No rate was found that keeps TPOT 0.001 ms" in page


def test_a_peer_stands_beside_ours(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEndpoint(gap_s=0.005) as fake:
        assert main([*command, "--peer-url", fake.url]) == 0
    text, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    result = json.loads((tmp_path / "out" / "climb.json").read_text())
    peer = result["peer"]
    assert (peer["url"], peer["model"], peer["rounds"]) == (fake.url, "fake", 3)
    ours = result["after"]["figures"]["output_tokens_per_s"]
    ratio = ours / peer["output_tokens_per_s"]
    assert ratio > 0
    for shown in (" ".join(text.split()), page):
        assert f"peer at {fake.url} (fake): " in shown
        assert "output tokens/s, ours " in shown
        assert "its figures include HTTP; ours are the engine" in shown
    assert "the peer" in result["time_ledger"]
    bodies = [served.body for served in fake.served[1:]]
    assert {body["max_tokens"] for body in bodies} == {8}  # the workload's
    assert all(type(body["prompt"]) is list for body in bodies)  # token ids, of its lengths
    assert {len(body["prompt"]) for body in bodies} == {16}


def test_a_peer_that_does_not_answer_is_refused_before_anything_is_measured(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(
        capsys, OfflineError, "http://127.0.0.1:9 does not answer", *command,
        "--peer-url", "http://127.0.0.1:9",
    )  # fmt: skip
    with FakeEndpoint(fault=lambda number: "401") as fake:
        refused(capsys, RequestError, "401 --peer-api-key-file", *command, "--peer-url", fake.url)
    assert Local.num_rounds == 0
    assert not (tmp_path / "out").exists()  # the next try needs no --resume


def test_a_peer_that_fails_later_is_a_note(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEndpoint(fault=lambda number: "500" if number else None) as fake:
        result = climbed(capsys, *command, "--peer-url", fake.url, "--peer-model", "that")
    peer = result["peer"]
    assert (peer["model"], peer["output_tokens_per_s"]) == ("that", None)
    assert "it failed while it was measured: " in peer["notes"][-1]
    assert result["total"] is not None  # the climb stands
    assert "(that): no figure" in (tmp_path / "out" / "report.html").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("peer")) as result:
        yield result


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_our_own_server_as_the_peer(
    goal: str,
    server: LiveServer,
    local: type[Local],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = climbed(capsys, *command, "--for", goal, "--peer-url", server.url)
    assert result["peer"]["output_tokens_per_s"] > 0
    assert result["peer"]["model"] == "tiny"
    assert not [note for note in result["peer"]["notes"] if "shorter" in note or "failed" in note]


@pytest.mark.slow
def test_our_own_server_as_the_peer_within_bounds(
    server: LiveServer,
    local: type[Local],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(optimize, "climb_model", partial(climb.climb_model, times=SHORT))
    result = climbed(capsys, *command, *BOUNDS, "--peer-url", server.url)
    assert result["peer"]["rate"] > 1.0
    assert result["peer"]["output_tokens_per_s"] is None
