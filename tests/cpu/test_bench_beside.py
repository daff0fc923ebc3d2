"""`bench serve --beside-engine`: both sides do the same, and each request's part is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused
from engines import engine_for, tiny
from live_server import chat, live_server, until
from tiny_models import save_model

from ridgeline.bench.serve.beside import BesidePlan, engine_rates
from ridgeline.bench.serve.placeholder import served_folder, write_tokenizer
from ridgeline.bench.serve.prompts import BodyMaker
from ridgeline.cli.main import main
from ridgeline.data import Tokenizer
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import UsageError
from ridgeline.server import front

Capture = pytest.CaptureFixture[str]
WORKLOAD = Workload("small", (WorkloadRequest(5, 3), WorkloadRequest(9, 4)))


def test_every_id_has_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 600)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 600
    texts = [tokenizer.decode([number]) for number in range(400, 599)]
    assert len(set(texts)) == len(texts)
    assert all(texts)
    assert tokenizer.eos_ids == (599,)


def test_a_model_without_a_tokenizer_is_given_one_elsewhere(tmp_path: Path) -> None:
    save_model("llama-mha", tmp_path)
    before = sorted(tmp_path.iterdir())
    with served_folder(tmp_path) as folder:
        assert folder != tmp_path
        assert (folder / "config.json").read_text() == (tmp_path / "config.json").read_text()
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        assert Tokenizer.load(folder).vocab_size == size
        with served_folder(folder) as again:
            assert again == folder
    assert sorted(tmp_path.iterdir()) == before


def test_both_sides_have_the_same_prompts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 600)
    maker = BodyMaker("completions", "m", Tokenizer.load(tmp_path))
    plan = BesidePlan(WORKLOAD, num_streams=2, num_requests=5, num_rounds=1, num_probes=1)
    for number in range(5):
        body = json.loads(maker.body(WORKLOAD, number % 2, 1000 + number // 2))
        assert body["prompt"] == plan.ids(number, 600, 1000)
        assert body["max_tokens"] == plan.request(number).num_output_tokens


def test_the_engine_alone_runs_as_many_streams() -> None:
    engine = engine_for(tiny("llama-mha"))
    most, reports, add = 0, [], engine.add

    def adding(*args: Any, **options: Any) -> Any:
        nonlocal most
        result = add(*args, **options)
        most = max(most, len(engine.local.loop._live))
        return result

    engine.add = adding  # type: ignore[method-assign]
    plan = BesidePlan(WORKLOAD, num_streams=2, num_requests=6, num_rounds=3, num_probes=1)
    rates = engine_rates(engine, plan, 131, lambda *words: reports.append(words))
    assert len(rates) == 3
    assert min(rates) > 0
    assert most == 2
    assert reports[-1] == ("rounds of the engine alone", 4, 4)


def test_the_log_tells_the_engines_part_of_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(front, "log_facts", lambda log, event, facts: lines.append(facts))
    with live_server(tmp_path) as server:
        headers = {"x-request-id": "probe-7"}
        server.post("/v1/chat/completions", chat(max_tokens=2), headers=headers)
        until(lambda: bool(lines))
    (line,) = lines
    assert line["request_id"] == "probe-7"
    assert 0 < line["engine_first_token_s"] <= line["first_token_s"] + 1e-3


@pytest.mark.slow
def test_a_server_beside_its_engine(tmp_path: Path, capsys: Capture) -> None:
    folder = make_folder(tmp_path / "model", max_position_embeddings=2048)
    argv = ["bench", "serve", "--beside-engine", str(folder), "--concurrency", "4", "--requests"]
    argv += ["6", "--workload", "cpu", "--output-tokens", "8", "--save", str(tmp_path), "--json"]
    assert main([*argv, "--engine-flags", "--device cpu --page-size 16"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["streams"] == 4
    assert document["num_probes"] == [100, 100]
    assert document["share"] == document["served_tokens_per_s"] / document["engine_tokens_per_s"]
    assert document["server_part_alone"]["p50"] > 0
    record = json.loads(Path(document["record"]).read_text())
    assert record["values"]["share_of_engine"]["value"] == document["share"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--url --beside-engine"),
        (["--url", "http://x", "--engine-flags=--tf32"], "--engine-flags --beside-engine"),
        (["--beside-engine", "demo", "--shape", "llama-3.1-8b"], "--beside-engine --shape"),
        (["--beside-engine", "demo", "--url", "http://x"], "--beside-engine --url"),
        (["--shape", "llama-3.1-8b", "--rate", "3"], "--rate"),
    ],
)
def test_what_does_not_go_together(argv: list[str], words: str, capsys: Capture) -> None:
    refused(capsys, UsageError, words, "bench", "serve", *argv)
