"""What reaches the engine's process beside its steps: cancels are obeyed before the next step
however many they are, deadlines are kept where the process is stuck, and priorities arrive, in each
of the three ways to run an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from engines import engine_for, prompts_of, tiny
from lost_processes import StandIn
from test_engine_api import writer

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.execution.work import StepMeter
from ridgeline.engine.loading.saved import Beside
from ridgeline.engine.process import supervisor
from ridgeline.engine.process.heartbeat import Heartbeat
from ridgeline.engine.process.supervisor import Supervisor
from ridgeline.engine.process.worker import (
    Add,
    Cancel,
    Command,
    EngineOrder,
    WorkerMessage,
    _serve,
)
from ridgeline.engine.replicas.pool import Pool
from ridgeline.engine.scheduling.state import Ask, End
from ridgeline.recipe import KV, Limits, Recipe

ORDER = EngineOrder(Path("unread"), Recipe(), "cpu", None, None)
GREEDY = Sampling(max_tokens=30, ignore_eos=True)


class EnoughError(BaseException):
    """Ends a loop that has no end."""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_cancels_free_their_pages_in_two_steps(overlap: bool) -> None:
    """They come while a step runs, of requests that all hold pages; one request goes on."""
    num_cancelled = 1000
    engine = engine_for(
        tiny("llama-mha"), num_pages=2200, budget=4096, max_batch=1100, overlap=overlap
    )
    loop, sampling = engine.local.loop, Sampling(max_tokens=40, ignore_eos=True)
    inbox: SimpleQueue[Command] = SimpleQueue()
    for number in range(1, num_cancelled + 2):
        prompt = (number % 100 + 3, number // 100 + 3)
        inbox.put(Add(Ask(number, prompt, 40), engine.job(prompt, sampling)))
    pages: list[int] = []  # in use after each step
    advance = loop.advance

    def step() -> None:
        advance()
        pages.append(engine.stats.num_pages_used)
        if len(pages) == 3:  # they came while the third step ran
            for number in range(1, num_cancelled + 1):
                inbox.put(Cancel(number))
        if len(pages) == 6:
            raise EnoughError

    loop.advance = step  # type: ignore[method-assign]
    sent: list[WorkerMessage] = []
    connection: Any = SimpleNamespace(send=lambda messages: sent.extend(messages))
    ahead: Any = SimpleNamespace(one=lambda: False)
    heartbeat, meter = Heartbeat(get_context("spawn")), StepMeter(engine.runner.device)
    with pytest.raises(EnoughError):
        _serve(loop, connection, heartbeat, inbox, meter, ahead)
    ended = {message.request_id for message in sent if isinstance(message, End)}
    assert ended == set(range(1, num_cancelled + 1))
    assert (pages[2], pages[4]) == (num_cancelled + 1, 1), f"after each step: {pages}"


def one_at_a_time() -> Engine:
    model, tokenizer = writer()
    limits = Limits(max_batch=1, token_budget=64)
    recipe = Recipe(dtype="fp32", overlap=True, kv=KV(page_size=16), limits=limits)
    return Engine(model, recipe, tokenizer=tokenizer, num_pages=64)


def never(*_: Any) -> bool:
    return False


def local(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return one_at_a_time()


def supervised(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(supervisor, "Worker", StandIn.maker(one_at_a_time, never))
    return Engine.over(Supervisor(ORDER), Beside(writer()[1]))


def replicated(monkeypatch: pytest.MonkeyPatch) -> Engine:
    pool = Pool(ORDER, [StandIn.maker(one_at_a_time, never) for _ in range(2)])
    pool.patience_s = 0.0
    return Engine.over(pool, Beside(writer()[1]))


Maker = Callable[[pytest.MonkeyPatch], Engine]


def outputs_of(engine: Engine) -> dict[Any, Output]:
    """Of all that is left to do, in the order in which it ends."""
    events = []
    while engine.has_work:
        events += engine.step()
    return {event.request_id: event for event in events if isinstance(event, Output)}


@pytest.mark.parametrize("make", [local, supervised, replicated])
def test_priorities_order_every_kind_of_engine(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(monkeypatch)
    for number, prompt in enumerate(prompts_of([5] * 10)):
        priority = 100 if number >= 6 else 0
        engine.add(prompt, GREEDY, request_id=number, priority=priority)
        engine.step()
    backend = engine._backend
    homes = dict(backend._at) if isinstance(backend, Pool) else {}
    order = list(outputs_of(engine))
    assert len(order) == 10
    for home in set(homes.values()) or {None}:
        ended = [number for number in order if homes.get(number) is home]
        assert len(ended) > 2
        assert ended == sorted(ended, key=lambda number: (number < 6, number))


@pytest.mark.parametrize("make", [supervised, replicated])
def test_a_deadline_passes_while_the_process_is_stuck(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(monkeypatch)
    with monkeypatch.context() as stuck:
        stuck.setattr(StandIn, "_advance", lambda self: None)
        engine.add([5, 6, 7], GREEDY, request_id="hurry", timeout_s=0.01)
        engine.add([5, 6, 8], GREEDY, request_id="patient")
        events: list[Any] = []
        while not events:
            events += engine.step()
        (output,) = events
        assert (output.request_id, output.status) == ("hurry", "cancelled")
        assert "deadline" in output.reason
    outputs = outputs_of(engine)
    assert {key: output.status for key, output in outputs.items()} == {"patient": "finished"}
    assert engine.stats.num_pages_used == 0
