"""Load in processes of its own: requests go out when they are due, or as soon as one of so many
clients is free, and every one comes back as an `Answer`.

Each process measures itself too, because a client that lags makes a server look slow: how late it
sent, how late its event loop came to what was ready, how busy it was. Its bodies are made before
the clock starts. Nothing heavy is imported here: processes start in a fraction of a second.

    with LoadProcesses(2) as load:
        report = load.run(Burst(endpoint, "/completions", shots, timeout_s=60.0))
        report.answers, report.own.lag_p99_s
"""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

from ridgeline.bench.serve.client import Answer, Client
from ridgeline.bench.serve.http import Endpoint
from ridgeline.errors import HardwareError

LEAD_S = 0.05  # from the word to start until the clock's zero
TICK_S = 0.01  # between looks at how late the event loop is
CUT = "cut off"  # the kind of error of what was not done when the time was up


class Shot(NamedTuple):
    number: int
    due_s: float  # after the clock's zero; means nothing where clients wait for each other
    body: bytes


@dataclass(frozen=True)
class Burst:
    """What is to be sent."""

    endpoint: Endpoint
    path: str
    shots: Sequence[Shot]  # in the order they are due
    timeout_s: float  # of each request
    num_clients: int | None = None  # that send one after the other, whatever is due when
    drain_s: float | None = None  # after the last one is due: what is not done then is cut off
    name: str = ""  # of the requests' ids, for who reads the server's log; none: no ids are sent

    def share(self, number: int, num: int) -> Burst:
        """The part of one of `num` processes."""
        clients = self.num_clients
        if clients is not None:
            clients = clients // num + (number < clients % num)
        return replace(self, shots=self.shots[number::num], num_clients=clients)


class Own(NamedTuple):
    """What the load generator was itself: of several processes, the worst."""

    late_p99_s: float  # from when a request was due until its turn came
    lag_p99_s: float  # of the event loop: as wrong as a time can be
    cpu_share: float  # of a core
    cpu_s_per_event: float


class Report(NamedTuple):
    start: float  # the clock's zero
    answers: list[Answer]  # in the order of their indices
    own: Own


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest one, as a latency that was really there; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class LoadProcesses:
    """Processes that wait for work. They end with the one that started them."""

    def __init__(self, num: int) -> None:
        context = get_context("spawn")
        self._links: list[Connection] = []
        self._processes = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_process, args=(theirs,), name="ridgeline-load", daemon=True
            )
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()

    def run(self, burst: Burst) -> Report:
        """Every request to its end."""
        links = self._links[: burst.num_clients]  # none without a client
        try:
            for number, link in enumerate(links):
                link.send(burst.share(number, len(links)))
            for link in links:
                link.recv()  # it is ready
            start = time.monotonic() + LEAD_S
            for link in links:
                link.send(start)
            reports: list[Report] = [link.recv() for link in links]
        except (EOFError, OSError) as error:
            raise HardwareError(f"a process of the load generator has died: {error!r}") from error
        answers = sorted((a for r in reports for a in r.answers), key=lambda a: a.index)
        owns = [report.own for report in reports]
        return Report(start, answers, Own(*(max(column) for column in zip(*owns, strict=True))))


def run_process(link: Connection) -> None:
    """The process: bursts come in, reports go out, until nobody is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            burst: Burst = link.recv()
            link.send("ready")
            start: float = link.recv()
            link.send(asyncio.run(fire(burst, start)))


async def fire(burst: Burst, start: float) -> Report:
    """One process's part of a burst, from the clock's zero on."""
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    client = Client(burst.endpoint)
    gc.disable()  # a collection in the middle would be counted as the server's time
    cpu, begun = time.process_time(), time.monotonic()
    try:
        sending = _open_loop if burst.num_clients is None else _closed_loop
        answers = await sending(burst, client, start)
    finally:
        gc.enable()
        watch.cancel()
        client.close()
    cpu, wall = time.process_time() - cpu, time.monotonic() - begun
    late = [answer.begun - answer.due for answer in answers]
    num_events = sum(answer.num_events for answer in answers)
    own = Own(percentile(late, 0.99), percentile(lags, 0.99), cpu / wall, cpu / max(num_events, 1))
    return Report(start, answers, own)


async def _watch(lags: list[float]) -> None:
    """How much later than asked for the event loop comes back."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags.append(time.monotonic() - before - TICK_S)


async def _open_loop(burst: Burst, client: Client, start: float) -> list[Answer]:
    """Each when it is due, however many are on their way."""
    answers = [Answer(shot.number, due=start + shot.due_s) for shot in burst.shots]
    tasks = []
    for shot, answer in zip(burst.shots, answers, strict=True):
        await asyncio.sleep(max(0.0, answer.due - time.monotonic()))
        asking = client.ask(
            burst.path, shot.body, timeout_s=burst.timeout_s, answer=answer, name=burst.name
        )
        tasks.append(asyncio.create_task(asking))
    if not tasks:
        return []
    left = None if burst.drain_s is None else answers[-1].due + burst.drain_s - time.monotonic()
    _, open_ones = await asyncio.wait(tasks, timeout=None if left is None else max(0.0, left))
    await _cut(open_ones)
    now = time.monotonic()
    for answer in answers:
        if not answer.end:
            answer.error, answer.detail, answer.end = CUT, "the time was up", now
    return answers


async def _cut(tasks: set[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _closed_loop(burst: Burst, client: Client, start: float) -> list[Answer]:
    """So many clients, each with its next request when the last one is answered."""
    waiting = deque(burst.shots)
    answers: list[Answer] = []

    async def one() -> None:
        while waiting:
            shot = waiting.popleft()
            answer = Answer(shot.number, due=time.monotonic())
            answers.append(answer)
            await client.ask(
                burst.path, shot.body, timeout_s=burst.timeout_s, answer=answer, name=burst.name
            )

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    await asyncio.gather(*(one() for _ in range(burst.num_clients or 0)))
    return answers
