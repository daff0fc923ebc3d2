"""The thread that runs the engine, with a stand-in for it; and what waits for clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from clock import check_elapsed
from live_server import until

from ridgeline.engine import Delta, Output, Sampling
from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.sampling.outputs import Event
from ridgeline.errors import HardwareError, UsageError
from ridgeline.server import pump as pumping
from ridgeline.server.door.refusals import RefusalError
from ridgeline.server.mailbox import Mailbox, Taken
from ridgeline.server.protocol import ApiError, ParsedPrompt
from ridgeline.server.pump import Pump, RequestKey, Ticket
from ridgeline.server.watchdog import Watchdog


def delta(number: int, prompt: int, text: str, sample: int = 0, **more: Any) -> Delta:
    return Delta(RequestKey(number, prompt, "a"), sample, text, (len(text),), more.get("reason"))


def output(number: int, prompt: int = 0) -> Output:
    key = RequestKey(number, prompt, "a")
    return Output(key, "finished", "stop", 1, 0, (), None, None, None, 0.0)


class StandIn:
    """Plays an Engine: gives what a test puts into `events`."""

    def __init__(self) -> None:
        self.events: list[list[Event]] = []
        self.added: list[tuple[Any, dict[str, Any]]] = []
        self.cancelled: list[Any] = []
        self.calls: list[str] = []
        self.refuses: Exception | None = None
        self.step_raises: Exception | None = None
        self.broken: Exception | None = None
        self.is_up, self.has_work, self.num_restarts = True, False, 0
        self.idle_s = 0.0
        self.stats = None

    @property
    def progress(self) -> EngineProgress:
        return SimpleNamespace(idle_s=self.idle_s)  # type: ignore[return-value]

    def be_patient(self, seconds: float) -> None:
        assert seconds == 0

    def wait(self, others: Any, seconds: float) -> None:
        time.sleep(0.002)

    def step(self) -> list[Event]:
        if self.step_raises is not None:
            error, self.step_raises = self.step_raises, None
            raise error
        return self.events.pop(0) if self.events else []

    def add(self, ids: Any, sampling: Any, **about: Any) -> None:
        if self.refuses is not None and about["request_id"].prompt == 1:
            raise self.refuses
        self.added.append((ids, about))

    def cancel(self, request_id: Any) -> bool:
        self.cancelled.append(request_id)
        return True

    def restart(self) -> None:
        self.calls.append("restart")

    def revive(self) -> None:
        self.calls.append("revive")

    def close(self) -> None:
        self.calls.append("close")


class Counts:
    """Plays the meters."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def tokens(self, num_tokens: dict[str, int], now: float) -> None:
        self.num_tokens += sum(num_tokens.values())

    def sample(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> StandIn:
    return StandIn()


@pytest.fixture
def pump(engine: StandIn) -> Iterator[Pump]:
    """With an event loop of its own, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    found = Pump(engine, Counts())  # type: ignore[arg-type]
    found.start(loop)
    yield found
    found.close()
    assert engine.calls[-1] == "close"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def on_loop(pump: Pump, work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(run(), pump._loop).result(5)


def submit(pump: Pump, name: str, num_prompts: int = 1, **more: Any) -> Ticket:
    prompts = [ParsedPrompt((1, 2), Sampling()) for _ in range(num_prompts)]
    ticket = Ticket(name, prompts, Mailbox(num_prompts, True), **more)
    on_loop(pump, lambda: pump.submit(ticket))
    return ticket


def take(pump: Pump, ticket: Ticket) -> list[tuple[int, Delta]]:
    return asyncio.run_coroutine_threadsafe(ticket.mailbox.take(), pump._loop).result(5)


def test_events_reach_their_mailboxes(pump: Pump, engine: StandIn) -> None:
    ticket = submit(pump, "a", 2, due=time.monotonic() + 100, salt="s", priority=3)
    until(lambda: len(engine.added) == 2)
    about = engine.added[1][1]
    assert (about["request_id"], about["salt"], about["priority"]) == (
        RequestKey(1, 1, "a"),
        "s",
        3,
    )
    assert 90 < about["timeout_s"] < 100
    engine.events.append([delta(1, 1, "xy"), delta(99, 0, "z"), output(1, 0)])
    assert [(prompt, part.text) for prompt, part in take(pump, ticket)] == [(1, "xy")]
    assert not ticket.mailbox.has_all
    on_loop(pump, lambda: pump.release(ticket))
    until(lambda: engine.cancelled == [RequestKey(1, 0, "a"), RequestKey(1, 1, "a")])
    assert not pump.holds("a")
    assert not pump.cancel("a")
    again = submit(pump, "a")
    engine.events.append([output(1, 1), output(2)])  # what still comes of the first is not for it
    assert take(pump, again) == []
    assert again.mailbox.outputs() == [output(2)]


def test_batches_pile_up_while_the_event_loop_is_busy(pump: Pump, engine: StandIn) -> None:
    ticket = submit(pump, "a")
    deliveries: list[int] = []
    deliver = pump._deliver

    def counted() -> None:
        deliveries.append(len(pump._out))
        deliver()

    pump._deliver = counted  # type: ignore[method-assign]
    busy = threading.Event()
    pump._loop.call_soon_threadsafe(busy.wait)
    engine.events += [[delta(1, 0, f"{number} ")] for number in range(100)]
    until(lambda: not engine.events)
    busy.set()
    ((_, merged),) = take(pump, ticket)
    assert merged.text == "".join(f"{number} " for number in range(100))
    assert len(merged.tokens) == 100
    assert deliveries[0] == 100 or sum(deliveries) == 100 > len(deliveries) * 10


def test_what_the_engine_refuses_is_told(pump: Pump, engine: StandIn) -> None:
    for error, status in ((UsageError("no"), 400), (HardwareError("no"), 503), (KeyError(), 503)):
        engine.refuses = error
        ticket = submit(pump, "a", 2)
        with pytest.raises(ApiError) as caught:
            take(pump, ticket)
        assert caught.value.status == status
        assert RequestKey(ticket.number, 0, "a") in engine.cancelled  # it was in already
        on_loop(pump, lambda ticket=ticket: pump.release(ticket))


def test_the_thread_outlives_errors(pump: Pump, engine: StandIn) -> None:
    engine.step_raises = KeyError("nobody thought of this")
    until(lambda: engine.calls == ["restart"])
    ticket = submit(pump, "a")
    engine.events.append([output(1)])
    assert take(pump, ticket) == []
    assert pump.is_alive


def test_an_engine_that_was_given_up_is_tried_again_later_and_later(
    pump: Pump, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pumping, "LONGEST_PAUSE_S", 0.2)
    pump._pause_s = 0.05
    began, pauses, times = time.monotonic(), [], []  # type: float, list[float], list[float]

    def revive() -> None:
        times.append(time.monotonic() - began)
        pauses.append(pump._pause_s)

    engine.revive = revive  # type: ignore[method-assign]
    engine.is_up, engine.broken = False, HardwareError("it died")
    until(lambda: pump.down_since is not None)
    with pytest.raises(RefusalError, match="it died"):
        pump.check_up()
    until(lambda: len(pauses) >= 4)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.2, 0.2])  # the one that would follow
    waits = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    for wait, least in zip(waits, (0.05, 0.1, 0.2, 0.2), strict=False):
        check_elapsed(wait, 3, least)
    engine.is_up, engine.broken = True, None
    until(lambda: pump.down_since is None)
    pump.check_up()
    engine.events.append([delta(1, 0, "x")])
    until(lambda: pump._pause_s == pumping.FIRST_PAUSE_S)  # it works: as at first


def test_the_watchdog_sees_what_is_stuck(pump: Pump, engine: StandIn) -> None:
    watchdog = Watchdog(pump, step_timeout=0.3)
    engine.idle_s = 1000.0  # it had nothing to do
    time.sleep(0.05)
    assert watchdog._reason() == ""
    engine.has_work = True
    until(lambda: pump.busy_since is not None)
    assert watchdog._reason() == ""  # it has just begun
    time.sleep(0.35)
    assert "no step has ended for" in watchdog._reason()
    engine.idle_s = 0.1
    assert watchdog._reason() == ""
    engine.is_up, engine.idle_s = False, 100.0
    assert watchdog._reason() == ""
    engine.idle_s = 10_000.0
    assert "loading" in watchdog._reason()


def test_mailboxes_merge_what_waits() -> None:
    async def run() -> None:
        mailbox = Mailbox(2, True)
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.put(0, delta(1, 0, "x"))
        mailbox.flush()
        assert [part.text for _, part in await waiting] == ["x"]
        for text in "abcde":
            mailbox.put(0, delta(1, 0, text))
            mailbox.put(0, delta(1, 0, text.upper(), sample=1))
        mailbox.put(1, delta(1, 1, "z", reason="stop"))
        mailbox.put(0, output(1, 0))
        mailbox.put(1, output(1, 1))
        assert mailbox.has_all
        assert not mailbox.is_complete
        taken = [(prompt, part.sample, part.text) for prompt, part in await mailbox.take()]
        assert taken == [(0, 0, "abcde"), (0, 1, "ABCDE"), (1, 0, "z")]
        assert mailbox.is_complete
        assert mailbox.outputs() == [output(1, 0), output(1, 1)]
        whole = Mailbox(1, False)
        whole.put(0, delta(1, 0, "x"))
        whole.fail(ApiError(503, "first"))
        whole.fail(ApiError(400, "second"))
        with pytest.raises(ApiError, match="first"):
            await whole.take()

    asyncio.run(run())


def test_nothing_overtakes_what_a_mailbox_has_handed_out() -> None:
    """A writer sends what comes, as long as it can; from then on it is not asked before the one who
    waits has taken the rest and waits again.
    """
    sent: list[str] = []
    ready = [True]

    def writer(take: Callable[[], Taken]) -> bool:
        if ready[0]:
            sent.extend(part.text for _, part in take())
        return ready[0]

    async def run() -> None:
        mailbox = Mailbox(1, True)
        waiting = asyncio.create_task(mailbox.take(writer))
        await asyncio.sleep(0)
        for texts in ("a", "bc"):
            for text in texts:
                mailbox.put(0, delta(1, 0, text))
            mailbox.flush()
        assert sent == ["a", "bc"]
        ready[0] = False
        mailbox.put(0, delta(1, 0, "d"))
        mailbox.flush()
        ready[0] = True  # though nobody has run since
        mailbox.put(0, delta(1, 0, "e"))
        mailbox.flush()
        assert sent == ["a", "bc"]
        assert [part.text for _, part in await waiting] == ["de"]
        mailbox.put(0, delta(1, 0, "f"))
        mailbox.flush()
        assert sent == ["a", "bc"]
        assert [part.text for _, part in await mailbox.take(writer)] == ["f"]

    asyncio.run(run())


def test_a_writer_that_fails_fails_its_own_mailbox() -> None:
    def writer(take: Callable[[], Taken]) -> bool:
        raise KeyError("no such text")

    async def run() -> None:
        mailbox = Mailbox(1, True)
        waiting = asyncio.create_task(mailbox.take(writer))
        await asyncio.sleep(0)
        mailbox.put(0, delta(1, 0, "a"))
        mailbox.flush()
        with pytest.raises(KeyError):
            await waiting

    asyncio.run(run())
