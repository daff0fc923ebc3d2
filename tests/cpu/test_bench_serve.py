"""`bench serve`: what it reports is what the endpoint did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refused
from fake_endpoint import FakeEndpoint
from html_tree import tree

from ridgeline.bench.serve.arrivals import Arrivals
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.client import Answer
from ridgeline.bench.serve.endpoint import Met, meet
from ridgeline.bench.serve.find import FindSettings, find_rate
from ridgeline.bench.serve.http import BadAnswerError, Endpoint, EventReader, ResponseReader
from ridgeline.bench.serve.load import CUT, LoadProcesses, Own, percentile
from ridgeline.bench.serve.measure import ServeRun, is_met, measure
from ridgeline.bench.serve.plot import draw
from ridgeline.bench.serve.prompts import WORDS, BodyMaker
from ridgeline.bench.serve.search import ProbeResult, highest_rate
from ridgeline.cli import main
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import OfflineError, RequestError, UsageError

Capture = pytest.CaptureFixture[str]


def workload(num: int = 8, prompt: int = 5, output: int = 6) -> Workload:
    return Workload("some", (WorkloadRequest(prompt, output),) * num)


@pytest.fixture(scope="module")
def load() -> Iterator[LoadProcesses]:
    with LoadProcesses(2) as processes:
        yield processes


def met_of(fake: FakeEndpoint, api: Any = "completions") -> Met:
    met = meet(Endpoint.parse(fake.url), api, None, None)
    fake.served.clear()
    return met


def run_at(
    load: LoadProcesses, fake: FakeEndpoint, rate: float, num: int, bound: LatencyBound | None =
    None, **options: Any,
) -> ServeRun:  # fmt: skip
    api = options.pop("api", "completions")
    arrivals = Arrivals.at_rate(rate, num, "fixed")
    return measure(
        load, met_of(fake, api), workload(), arrivals, bound or LatencyBound(), **options
    )


# --- HTTP and events ------------------------------------------------------------------------------

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: text/event-stream\r\n\r\n5\r\nhello\r\nA;x=y\r\n, 12345678\r\n0\r\n"
    b"trailer: 1\r\n\r\n"
)
PLAIN = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("data", "status", "body"), [(CHUNKED, 200, b"hello, 12345678"), (PLAIN, 404, b"hello")]
)
def test_answers_are_read_however_they_are_cut(
    size: int, data: bytes, status: int, body: bytes
) -> None:
    reader = ResponseReader()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    found = b"".join(piece for part in pieces for piece in reader.feed(part))
    assert (reader.status, found, reader.is_done, reader.keeps_alive) == (status, body, True, True)


def test_an_answer_may_end_with_its_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nall ") == [b"all "]
    assert not reader.is_done
    reader.close()
    assert reader.is_done
    cut = ResponseReader()
    cut.feed(CHUNKED[:-10])
    cut.close()
    assert not cut.is_done


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0 hello\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", b"x" * 70_000,
     b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
)  # fmt: skip
def test_what_is_no_answer_is_said(data: bytes) -> None:
    with pytest.raises(BadAnswerError):
        ResponseReader().feed(data)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    data = b': note\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
    reader = EventReader()
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    found = [event for part in parts for event in reader.feed(part)]
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [("http://a", "a", 80, "/v1"), ("https://a/", "a", 443, "/v1"),
     ("http://[::1]:9/v1/", "::1", 9, "/v1"), ("http://a:8/x", "a", 8, "/x/v1")],
)  # fmt: skip
def test_urls(url: str, host: str, port: int, base: str) -> None:
    found = Endpoint.parse(url)
    assert (found.host, found.port, found.base) == (host, port, base)


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "merged"), [("completions", 1), ("chat", 2)])
def test_times_are_those_of_the_endpoint(load: LoadProcesses, api: str, merged: int) -> None:
    with FakeEndpoint(ttft_s=0.06, gap_s=0.02, merged=merged) as fake:
        run = run_at(load, fake, 20.0, 24, api=api)
        served = list(fake.served)
    assert (run.num_requests, run.num_answered, run.errors) == (24, 24, {})
    assert (run.num_output_tokens, run.num_prompt_tokens, run.num_short) == (144, 168, 0)
    waits = [each.events[0] - each.arrived for each in served]
    spans = [(each.events[-1] - each.events[0]) / 5 for each in served]
    gaps = [b - a for each in served for a, b in zip(each.events, each.events[1:], strict=False)]
    for found, known in (
        (run.first_token, waits),
        (run.per_output_token, spans),
        (run.between_events, gaps),
    ):
        assert found is not None
        expected = np.percentile(known, (50, 90, 99))
        slack = 0.003 + run.own.lag_p99_s + run.own.late_p99_s
        assert np.abs(np.array(found) - expected).max() < slack + 0.25 * expected.max()
    assert run.first_token is not None
    assert run.first_token.p50 >= 0.06
    assert run.request is not None
    assert run.request.p50 >= run.first_token.p50 + (6 / merged - 1) * 0.02
    assert run.offered_rate == pytest.approx(20.0)
    assert 23 / 20 < run.wall_s < 23 / 20 + 2


def test_errors_are_counted_by_kind(load: LoadProcesses) -> None:
    kinds = ["429", "503", "hang", "garbage", "error", "close", "no done"]
    faults = dict(enumerate(kinds, 1))  # the first is the hello
    with FakeEndpoint(fault=lambda number: faults.get(number)) as fake:
        met = meet(Endpoint.parse(fake.url), "completions", None, None)
        arrivals = Arrivals.at_rate(50.0, 10)
        run = measure(load, met, workload(), arrivals, LatencyBound(ttft_s=5.0), timeout_s=1.0)
    assert run.errors == {
        "http 429": 1, "http 503": 1, "timeout": 1, "malformed": 2, "in the stream": 1,
        "disconnected": 1,
    }  # fmt: skip
    assert (run.num_answered, run.num_within) == (3, 3)
    assert any("the engine has died" in detail for detail in run.details)
    assert any("so it was wanted" in detail for detail in run.details)


def test_connections_are_used_again_and_replaced(load: LoadProcesses) -> None:
    with FakeEndpoint() as fake:
        run_at(load, fake, 20.0, 8)
        assert len({each.connection for each in fake.served}) == 2  # one a process
    with FakeEndpoint(keeps_alive=False) as fake:
        run = run_at(load, fake, 20.0, 8)
        assert run.errors == {}
        assert len({each.connection for each in fake.served}) == 8


def test_clients_wait_for_their_answers(load: LoadProcesses) -> None:
    with FakeEndpoint(ttft_s=0.05) as fake:
        arrivals = Arrivals.of_clients(3, 9)
        run = measure(load, met_of(fake), workload(output=1), arrivals, LatencyBound())
        times = sorted(each.arrived for each in fake.served)
    assert run.num_answered == 9
    assert run.offered_rate is None
    assert 0.15 <= run.wall_s < 1.0
    assert times[3] - times[0] >= 0.045  # the fourth waits for one of the first three


def test_one_client_in_two_processes(load: LoadProcesses) -> None:
    with FakeEndpoint() as fake:
        run = measure(load, met_of(fake), workload(), Arrivals.of_clients(1, 5), LatencyBound())
    assert run.num_answered == 5


def test_a_request_waits_from_when_it_was_due(load: LoadProcesses) -> None:
    """One at a time is served: the later ones wait in line, and say so."""
    with FakeEndpoint(ttft_s=0.1, num_slots=1) as fake:
        run = measure(
            load, met_of(fake), workload(output=1), Arrivals.at_rate(40.0, 8), LatencyBound()
        )
    assert run.first_token is not None
    assert run.first_token.p99 > 0.8 - 7 / 40 - 0.02


def test_what_is_not_done_in_time_is_cut_off(load: LoadProcesses) -> None:
    with FakeEndpoint(gap_s=0.2) as fake:
        run = run_at(load, fake, 100.0, 6, LatencyBound(ttft_s=0.2), drain_s=0.4)
        assert run.errors == {CUT: 6}
        assert run.num_within == 6  # each had its first token in time
        both = run_at(load, fake, 100.0, 6, LatencyBound(ttft_s=0.2, tpot_s=1.0), drain_s=0.4)
    assert both.num_within == 0
    assert 0.4 < run.wall_s < 1.2


def test_the_bound() -> None:
    bound = LatencyBound(ttft_s=0.5, tpot_s=0.1)
    good = Answer(due=1.0, first=1.4, last=2.4, end=2.5, num_events=11)
    assert is_met(bound, good)
    assert not is_met(bound, replace(good, due=0.8))
    assert not is_met(bound, replace(good, last=2.6))
    assert not is_met(bound, replace(good, error="http 500"))
    assert not is_met(bound, replace(good, first=None))
    assert is_met(bound, replace(good, num_tokens=21, last=3.4))  # merged events
    assert is_met(LatencyBound(tpot_s=0.1), replace(good, num_events=1))
    assert bound.longest_s(11) == pytest.approx(1.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--ttft-ms"):
            LatencyBound(ttft_s=wrong)


def test_a_client_that_lags_says_so(load: LoadProcesses) -> None:
    with FakeEndpoint() as fake:
        run = run_at(load, fake, 50.0, 4)
    calm = replace(run, own=Own(0.001, 0.001, 0.1, 1e-5))
    assert calm.client_note is None
    for own, words in (
        (Own(0.5, 0.0, 0.1, 1e-5), "500 ms late"),
        (Own(0.0, 0.2, 0.1, 1e-5), "up to 200 ms late"),
        (Own(0.0, 0.0, 0.97, 1e-5), "busy 97%"),
    ):
        note = replace(run, own=own).client_note
        assert note is not None
        assert words in note
        assert "--processes" in note
    assert run.own.cpu_share > 0
    assert 0 < run.own.cpu_s_per_event < 0.1


def test_a_process_can_take_five_thousand_events_a_second(load: LoadProcesses) -> None:
    """By its own processor time, which others on the machine do not change much."""
    with FakeEndpoint() as fake:
        arrivals = Arrivals.of_clients(4, 8)
        run = measure(load, met_of(fake, "chat"), workload(output=800), arrivals, LatencyBound())
    assert run.num_output_tokens == 6400
    assert run.own.cpu_s_per_event < 1 / 5000


def test_load_processes_import_nothing_heavy() -> None:
    code = "import sys, ridgeline.bench.serve.load; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(value) for value in range(1, 101)], 0.5) == 50.0


# --- endpoints and prompts ------------------------------------------------------------------------


def test_options_that_a_server_refuses_are_left_out() -> None:
    with FakeEndpoint(refuses=("ignore_eos", "stream_options")) as fake:
        met = meet(Endpoint.parse(fake.url), "chat", None, None)
        assert met.maker.without == ("ignore_eos", "stream_options")
        assert len(met.notes) == 2
    with FakeEndpoint(refuses=("ignore_eos",)) as fake:
        assert meet(Endpoint.parse(fake.url), "chat", "x", None).maker.without == ("ignore_eos",)
    with (
        FakeEndpoint(refuses=("prompt",)) as fake,
        pytest.raises(RequestError, match="prompt is not known"),
    ):
        meet(Endpoint.parse(fake.url), "completions", None, None)
    with pytest.raises(OfflineError, match="does not answer"):
        meet(Endpoint.parse(fake.url), "completions", None, None)


def test_without_a_count_an_event_is_a_token(load: LoadProcesses) -> None:
    with FakeEndpoint(refuses=("stream_options", "ignore_eos"), merged=2) as fake:
        run = run_at(load, fake, 50.0, 4)
    assert (run.num_output_tokens, run.num_prompt_tokens) == (12, None)
    assert run.num_short == 4


def test_prompts_share_what_the_workload_shares() -> None:
    requests = (
        WorkloadRequest(6, 1, block_hashes=(1, 2)),
        WorkloadRequest(8, 1, block_hashes=(1, 3)),
    )
    shared = Workload("blocks", requests, block_tokens=4)
    maker = BodyMaker("completions", "m")
    for seed in (0, 1):
        first, second = (
            json.loads(maker.body(shared, index, seed))["prompt"].split() for index in (0, 1)
        )
        assert (len(first), len(second)) == (6, 8)
        assert first[:4] == second[:4]
        assert first[4:] != second[4:6]
    assert maker.body(shared, 0, 0) != maker.body(shared, 0, 1)
    given = Workload("given", (WorkloadRequest(2, 1, prompt=(9999, 10000)),))
    chat = json.loads(BodyMaker("chat", "m").body(given, 0))
    assert set(chat["messages"][0]["content"].split()) <= set(WORDS)
    assert maker.body(given, 0, 0) != maker.body(given, 0, 1)


def test_arrivals() -> None:
    requests = tuple(WorkloadRequest(1, 1, arrival_s=time) for time in (0.0, 1.0, 4.0))
    trace = Workload("trace", requests)
    assert Arrivals.of_trace(trace).times == (0.0, 1.0, 4.0)
    assert Arrivals.of_trace(trace, num=5).times == (0.0, 1.0, 4.0, 6.0, 7.0)
    assert Arrivals.of_trace(trace, rate=2.0).times == (0.0, 0.25, 1.0)
    assert Arrivals.of_trace(trace).rate == 0.5
    assert Arrivals.at_rate(4.0, 3, "fixed").times == (0.0, 0.25, 0.5)
    drawn = Arrivals.at_rate(10.0, 2001, "poisson", seed=3)
    gaps = np.diff(drawn.times)
    assert drawn.rate == pytest.approx(10.0)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as in a Poisson process
    assert Arrivals.at_rate(10.0, 5, seed=4).times != Arrivals.at_rate(10.0, 5, seed=5).times
    with pytest.raises(UsageError, match="--rate"):
        Arrivals.at_rate(0.0, 5)
    with pytest.raises(UsageError, match="no arrival times"):
        Arrivals.of_trace(workload(), rate=2.0)


# --- the command ----------------------------------------------------------------------------------


def test_two_endpoints_side_by_side(tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        + "".join(
            f"{5 + second / 10},ChatGPT,{4 + second},{3 + second},9,x\n" for second in range(4)
        )
    )
    key = tmp_path / "key"
    key.write_text("secret\n")
    with FakeEndpoint(ttft_s=0.02) as fast, FakeEndpoint(ttft_s=0.8) as slow:
        argv = ["bench", "serve", "--url", fast.url, "--url", slow.url + "/v1"]
        argv += ["--workload", str(trace), "--ttft-ms", "700", "--api-key-file", str(key)]
        assert main([*argv, "--json", "--save", str(tmp_path / "results"), "--rounds", "2"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(argv) == 0
        shown = capsys.readouterr().out
    first, second = found["endpoints"]
    assert (first["num_output_tokens"], first["model"]) == (18, "fake")
    assert (first["within"]["value"], second["within"]["value"]) == (1.0, 0.0)
    assert first["first_token"]["p50"] < 0.7 < second["first_token"]["p50"]
    assert len(first["rounds"]) == 2
    record = json.loads(Path(found["record"]).read_text())
    assert record["values"]["endpoint_2_first_token_p99"]["value"] > 0.8
    assert "secret" not in json.dumps(record) + shown
    for text in ("first token (TTFT)", "4 of 4", "goodput", "100.0%", "0.0%", "load client"):
        assert text in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--url", "ftp://x"], "--url 'ftp://x' http://"),
        (["--url", "http://x:99999"], "--url Port"),
        (["--url", "http://x", "--url", "http://x"], "twice"),
        (["--url", "http://x", "--find"], "--find --ttft-ms"),
        (["--url", "http://x", "--concurrency", "4", "--rate", "2"], "--concurrency --rate"),
        (["--url", "http://x", "--concurrency", "0"], "--concurrency 0"),
        (["--url", "http://x", "--share", "0.5"], "--share --find"),
        (["--url", "http://x", "--ttft-ms", "5", "--find", "--share", "1"], "--share 1 0"),
        (["--url", "http://x", "--arrivals", "fixed"], "fixed --rate"),
        (["--url", "http://x", "--rate", "-1"], "--rate -1"),
        (["--url", "http://x", "--ttft-ms", "0"], "--ttft-ms 0"),
        (["--url", "http://x", "--processes", "0"], "--processes 0 1"),
        (["--url", "http://x", "--plot", "x.gif"], "--plot .html"),
        (["--url", "http://x", "--workload", "cpuu"], "'cpuu' cpu"),
        (["--rate", "1"], "--url"),
    ],
)
def test_refused(argv: list[str], says: str, capsys: Capture) -> None:
    refused(capsys, UsageError, says, "bench", "serve", *argv)


def test_an_endpoint_that_is_not_there(capsys: Capture) -> None:
    refused(
        capsys, OfflineError, "does not answer", "bench", "serve", "--url", "http://127.0.0.1:9"
    )


def test_a_plot_is_drawn(load: LoadProcesses, tmp_path: Path) -> None:
    with FakeEndpoint(gap_s=0.002) as fake:
        run = run_at(load, fake, 50.0, 8, LatencyBound(ttft_s=0.5))
    found = highest_rate(
        lambda rate, number: ProbeResult(50, 50 if rate < 5 else 10), 4.0, 0.9, 0.5, 6
    )
    path = tmp_path / "serve.html"
    draw(path, {fake.url: run}, {fake.url: found}, LatencyBound(ttft_s=0.5))
    figures = tree(path.read_text()).all("figure", "curves")
    assert len(figures) == 5
    assert [len(figure.all("svg", "plot")) for figure in figures] == [1] * 5
    assert "bound, 500 ms" in figures[0].text
    assert "100%" in figures[-1].text


@pytest.mark.slow
def test_the_search_over_a_live_endpoint(load: LoadProcesses) -> None:
    """Four at a time, 0.2 s each: 20 requests a second and not more. So slow that a client which
    comes 0.2 s late, as one on a busy machine does, is not taken for the server.
    """
    settings = FindSettings(
        LatencyBound(ttft_s=0.8), target=0.9, precision=0.3, probe_s=3.0, max_probes=4, start=10.0,
        pattern="fixed",
    )  # fmt: skip
    with FakeEndpoint(ttft_s=0.2, num_slots=4) as fake:
        found, run = find_rate(load, met_of(fake), workload(output=1), settings)
    assert found.met is not None
    assert found.failed is not None
    assert 10.0 <= found.met.rate <= 21.0
    assert found.failed.rate <= 40.5
    assert run.num_within == run.num_requests
