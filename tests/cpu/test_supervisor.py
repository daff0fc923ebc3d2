"""Requests go on when the engine's process is lost, as if nothing had happened; who loses it is
found.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest
import torch
from engines import prompts_of
from forked_processes import forked_engine
from lost_processes import DEADLY, SLOW, STUCK_S, Deadly, StandIn, break_at_positions
from test_engine_api import writer
from tiny_models import save_model
from tiny_tokenizers import byte_level_metadata

from ridgeline.cli.early import Early
from ridgeline.data import Tokenizer
from ridgeline.data.generation_config import GenerationConfig
from ridgeline.engine import Delta, Engine, Grammar, Output, Sampling
from ridgeline.engine.loading.saved import Beside
from ridgeline.engine.process import trials
from ridgeline.engine.process.heartbeat import Heartbeat
from ridgeline.engine.process.held import Held
from ridgeline.engine.process.supervisor import MAX_BARREN
from ridgeline.engine.process.trials import TRIAL_TOKENS
from ridgeline.engine.process.worker import EngineOrder, Refused, run_worker
from ridgeline.errors import ContextLengthError, HardwareError, ModelNotFoundError, UsageError
from ridgeline.quantization import load_model
from ridgeline.recipe import KV, Limits, Recipe

LIMITS = Limits(max_batch=16, token_budget=64, memory_share=0.02)
RECIPE = Recipe(dtype="fp32", overlap=True, kv=KV(page_size=16), limits=LIMITS)
DRAWN = Sampling(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
SETTINGS = [
    Sampling(max_tokens=14, ignore_eos=True),
    replace(DRAWN, repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=3),
    replace(DRAWN, n=3, logprobs=1),
    replace(DRAWN, n=1, best_of=3, presence_penalty=0.5),
    replace(DRAWN, grammar=Grammar.regex("[a-z]{3} [0-9]{4,6}")),
    replace(DRAWN, prompt_logprobs=2, logit_bias={50: 3.0}),
]


def plain_engine() -> Engine:
    model, tokenizer = writer()
    return Engine(model, RECIPE, tokenizer=tokenizer, num_pages=64)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Callable[[Deadly], Engine]:
    """Makes an engine whose process is a stand-in."""

    def make(deadly: Deadly) -> Engine:
        path = "ridgeline.engine.process.supervisor."
        monkeypatch.setattr(path + "Worker", StandIn.maker(plain_engine, deadly))
        files = Beside(writer()[1], GenerationConfig())
        monkeypatch.setattr(path + "beside", lambda path: files)
        return Engine.supervised(Path("unread"), RECIPE)

    return make


def run(engine: Engine, prompts: list[list[int]], samplings: list[Sampling]) -> list[Output]:
    """All requests by hand; their deltas, joined, must be their outputs."""
    pieces: dict[tuple[object, int], list[Delta]] = {}
    outputs: dict[object, Output] = {}
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.add(prompt, sampling, request_id=f"r{number}")
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Output):
                outputs[event.request_id] = event
            else:
                pieces.setdefault((event.request_id, event.sample), []).append(event)
    for (request_id, sample), deltas in pieces.items():
        completion = outputs[request_id].completions[sample]
        assert tuple(token for delta in deltas for token in delta.tokens) == completion.tokens
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [delta.finish_reason for delta in deltas][:-1] == [None] * (len(deltas) - 1)
    return [outputs[f"r{number}"] for number in range(len(prompts))]


def assert_same(found: Output, expected: Output) -> None:
    assert found.status == "finished", found.reason
    assert found.reason == expected.reason
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (
            other.tokens,
            other.text,
            other.finish_reason,
        )
        assert len(one.logprobs or ()) == len(other.logprobs or ())
    for left, right in zip(
        found.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True
    ):
        assert (left is None) == (right is None)
        assert left is None or right is None or abs(left.logprob - right.logprob) < 1e-4


def test_outputs_survive_processes_that_die(
    supervised: Callable[[Deadly], Engine],
) -> None:
    """Nobody is to blame: it dies now and then, when there are many rows."""
    last = {0: 5, 1: 2, 2: 3}  # of those steps, the one in which each process dies
    counts: dict[int, int] = {}

    def deadly(process: int, positions: list[int], num_rows: int) -> bool:
        counts[process] = counts.get(process, 0) + (num_rows > 3)
        return num_rows > 3 and counts[process] == last.get(process)

    prompts = prompts_of([9, 30, 14, 22, 5, 41])
    (free,) = plain_engine().generate([prompts[0]], SETTINGS[0])
    stop = replace(SETTINGS[0], stop=(free.text[5:7],))
    prompts, samplings = [*prompts, prompts[0]], [*SETTINGS, stop]
    expected = plain_engine().generate(prompts, samplings)
    assert expected[-1].finish_reason == "stop"
    engine = supervised(deadly)
    for found, right in zip(run(engine, prompts, samplings), expected, strict=True):
        assert_same(found, right)
    assert engine.num_restarts >= 2
    (found,) = run(engine, prompts[-1:], [stop])  # what comes after it is dropped
    assert_same(found, expected[-1])
    steps = engine.progress.num_steps
    (vector,) = engine.embed([prompts[1]])
    torch.testing.assert_close(vector, plain_engine().embed([prompts[1]])[0])
    assert engine.progress.num_steps > steps > 0
    assert engine.stats.num_pages_used == 0


def test_who_kills_the_process_is_found(
    supervised: Callable[[Deadly], Engine],
) -> None:
    prompts = prompts_of([9, 41, 14, 22, 42])
    samplings = [replace(SETTINGS[0], max_tokens=20)] * 5
    expected = plain_engine().generate(prompts, samplings)
    engine = supervised(lambda process, positions, num_rows: max(positions) == DEADLY)
    outputs = run(engine, prompts, samplings)
    for index in (0, 2, 3):
        assert_same(outputs[index], expected[index])
    for index in (1, 4):
        assert outputs[index].status == "failed"
        assert "each time this request was running" in outputs[index].reason
        assert "SIGKILL" in outputs[index].reason
        (completion,) = outputs[index].completions
        assert completion.tokens == expected[index].tokens[: len(completion.tokens)]
    assert engine.num_restarts == 3  # the first time, and once for each of the two


@pytest.mark.parametrize("is_deadly", [False, True])
def test_where_trials_take_long_suspects_are_tried_together(
    supervised: Callable[[Deadly], Engine], is_deadly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups that double; one that dies is halved until the guilty one is alone."""
    monkeypatch.setattr(trials, "PATIENCE_S", -1.0)
    sizes: list[int] = []
    following = trials.SuspectTrials.next

    def next_group(self: trials.SuspectTrials) -> list[Held]:
        self.start_s = -1.0
        sizes.append(len(following(self)))
        return self.running

    monkeypatch.setattr(trials.SuspectTrials, "next", next_group)
    prompts = prompts_of([9, 14, 22, 30, 12, 60, 17])
    samplings = [replace(SETTINGS[0], max_tokens=20)] * len(prompts)
    expected = plain_engine().generate(prompts, samplings)

    def deadly(process: int, positions: list[int], num_rows: int) -> bool:
        if process == 0:
            return num_rows == len(prompts)
        return is_deadly and max(positions) >= 60  # the long one's, in any step

    engine = supervised(deadly)
    outputs = run(engine, prompts, samplings)
    assert sizes[:3] == [1, 2, 4]
    for index, output in enumerate(outputs):
        if is_deadly and index == 5:
            assert output.status == "failed"
            assert "each time this request was running" in output.reason
        else:
            assert_same(output, expected[index])
    assert engine.num_restarts == (4 if is_deadly else 1)
    assert sizes[3:] == ([2, 2, 1, 1] if is_deadly else [])


def test_who_kills_the_process_is_found_though_nobody_waits_for_its_grammar(
    supervised: Callable[[Deadly], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with its first token each time; it is let out of its first trial, and of no other."""
    monkeypatch.setattr(trials, "PREPARING_S", -1.0)
    prompts = prompts_of([9, 41, 14])
    plain = replace(SETTINGS[0], max_tokens=20)
    samplings = [plain, SETTINGS[4], plain]
    expected = plain_engine().generate(prompts, samplings)
    engine = supervised(lambda process, positions, num_rows: 40 in positions)
    outputs = run(engine, prompts, samplings)
    assert [output.status for output in outputs] == ["finished", "failed", "finished"]
    assert "each time this request was running" in outputs[1].reason
    for index in (0, 2):
        assert_same(outputs[index], expected[index])
    assert engine.num_restarts <= 3


@pytest.mark.parametrize("left", range(2, 2 * TRIAL_TOKENS))
def test_a_suspect_whose_trial_ends_with_its_last_token_ends(
    supervised: Callable[[Deadly], Engine], left: int
) -> None:
    """The process dies when there are so many tokens left to be made."""
    engine = supervised(lambda process, positions, num_rows: process == 0 and max(positions) == 12)
    (prompt,) = prompts_of([9])
    sampling = replace(SETTINGS[0], max_tokens=3 + left)
    expected = plain_engine().generate([prompt], sampling)
    engine.add(prompt, sampling, request_id="r0")
    events: list[object] = []
    for _ in range(60):
        events += engine.step()
    (output,) = (event for event in events if isinstance(event, Output))
    assert_same(output, expected[0])
    assert not engine.has_work
    assert engine.num_restarts == 1


def test_a_device_that_is_gone_ends_everything(
    supervised: Callable[[Deadly], Engine],
) -> None:
    engine = supervised(lambda process, positions, num_rows: True)
    outputs = run(engine, prompts_of([9] * 8), [SETTINGS[0]] * 8)
    assert [output.status for output in outputs] == ["failed"] * 8
    assert engine.num_restarts == MAX_BARREN - 1
    assert f"{MAX_BARREN} times in a row" in outputs[-1].reason
    with pytest.raises(HardwareError, match="in a row"):
        engine.add([5])
    assert not engine.has_work


def test_requests_can_be_cancelled_and_be_late_while_there_is_no_process(
    supervised: Callable[[Deadly], Engine],
) -> None:
    engine = supervised(lambda process, positions, num_rows: process == 0)
    (prompt,) = prompts_of([9])
    engine.add(prompt, SETTINGS[0], request_id="a")
    engine.add(prompt, SETTINGS[0], request_id="b", timeout_s=0.0)
    engine.add(prompt, SETTINGS[0], request_id="c")
    with pytest.raises(UsageError, match="is in use"):
        engine.add(prompt, request_id="a")
    while not engine.num_restarts:
        engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    events = []
    while engine.has_work:
        events += engine.step()
    ended = {event.request_id: event for event in events if isinstance(event, Output)}
    assert {key: output.status for key, output in ended.items()} == {"c": "finished"} | {
        key: "cancelled" for key in ended if key != "c"
    }
    assert ended["c"].tokens == plain_engine().generate([prompt], SETTINGS[0])[0].tokens
    engine.add(prompt, SETTINGS[0], request_id="d")
    engine.close()
    (output,) = (event for event in engine.step() if isinstance(event, Output))
    assert (output.request_id, output.status) == ("d", "cancelled")


def saved_model(folder: Path) -> Path:
    save_model("llama-mha", folder)
    for name, content in Tokenizer.from_gguf(byte_level_metadata("smollm")).files().items():
        (folder / name).write_bytes(content)
    return folder


def test_real_processes(tmp_path: Path) -> None:
    """A device that is lost, a process that is killed, one that is stuck: in one test, because each
    process takes seconds to start; those that follow the first are forked.
    """
    forked: list[Early] = []

    def start() -> Early:
        forked.append(forked_engine())
        return forked[-1]

    path = saved_model(tmp_path)
    prompts = prompts_of([9, 41, 14])
    samplings = [SETTINGS[0], SETTINGS[0], replace(DRAWN, n=2)]
    alone = Engine(load_model(path, dtype="fp32", device="cpu"), RECIPE, num_pages=64)
    expected = alone.generate(prompts, samplings)
    with Engine.supervised(
        path, RECIPE, device="cpu", num_pages=64, setup=break_at_positions
    ) as engine:
        engine._backend._early = start  # type: ignore[attr-defined]
        outputs = run(engine, prompts, samplings)
        assert [output.status for output in outputs] == ["finished", "failed", "finished"]
        assert "SIGKILL" in outputs[1].reason
        assert len(outputs[1].tokens) == DEADLY - 41
        for index in (0, 2):
            tokens = [completion.tokens for completion in outputs[index].completions]
            assert tokens == [completion.tokens for completion in expected[index].completions]
        assert engine.num_restarts == 2
        assert len(forked) == 2
        assert_stuck_is_seen(engine)


def assert_stuck_is_seen(engine: Engine) -> None:
    longest, steps, before = 0.0, engine.progress.num_steps, engine.progress.work
    engine.add(prompts_of([SLOW])[0], replace(SETTINGS[0], max_tokens=3))  # begins at once
    while engine.has_work:
        engine.step()
        longest = max(longest, engine.progress.idle_s)
    assert longest > STUCK_S / 2
    assert engine.progress.num_steps == steps + 4  # two pieces of the prompt, and two tokens
    assert engine.progress.last_step_s > 0
    work = engine.progress.work
    assert work.prefill.num_steps == before.prefill.num_steps + 2
    assert work.decode.num_steps == before.decode.num_steps + 2
    assert work.prefill.busy_s > before.prefill.busy_s
    assert sum(work.wait_counts) == sum(before.wait_counts) + 1
    assert sum(work.first_counts) == sum(before.first_counts) + 1
    assert engine.costs is not None
    assert engine.costs.bytes_per_weight == 4.0


def test_a_process_that_is_given_up_is_replaced(
    supervised: Callable[[Deadly], Engine],
) -> None:
    engine, prompts = supervised(lambda process, positions, num_rows: False), prompts_of([9, 30])
    expected = plain_engine().generate(prompts, SETTINGS[0])
    stream = engine.stream(prompts[0], SETTINGS[0])
    tokens = [next(stream).tokens for _ in range(5)]
    engine.restart()
    tokens += [delta.tokens for delta in stream]
    assert tuple(token for each in tokens for token in each) == expected[0].tokens
    engine.restart()  # with nothing to do
    for _ in range(MAX_BARREN + 1):
        engine.step()
        engine.restart()
    assert_same(engine.generate([prompts[1]], SETTINGS[0])[0], expected[1])


def test_what_cannot_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="name or path"):
        Engine.supervised(writer()[0])  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError):
        Engine.supervised(tmp_path / "nothing")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    long = replace(RECIPE, limits=replace(LIMITS, max_context=10**6))
    ours, theirs = Pipe()
    order = EngineOrder(saved_model(tmp_path), long, "cpu", None, None)
    run_worker(theirs, Heartbeat(get_context("spawn")), order)  # here, where it returns
    (message,) = ours.recv()
    assert isinstance(message, Refused)
    assert isinstance(message.error, ContextLengthError)
    monkeypatch.setattr("ridgeline.engine.process.supervisor.Worker", lambda order: Silent(message))
    with pytest.raises(ContextLengthError, match="the model reaches 128"):
        Engine.supervised(order.model, long)


class Silent:
    """A process that only says that it cannot start."""

    def __init__(self, message: Refused) -> None:
        self.message, self.is_ready = message, False

    def receive(self, seconds: float) -> list[Refused]:
        return [self.message]

    def close(self) -> None:
        pass
