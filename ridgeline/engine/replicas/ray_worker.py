"""An engine's process on any machine of a Ray cluster, behind the same handle as a local one's
(engine/process/worker.py, which does the work at the other end).

Ray places an actor with the devices that a replica needs (a whole tensor-parallel group); the actor
starts the engine's process and forwards commands and news. A thread here waits for the news, so
that a pool can wait for all replicas at once. Clocks differ between machines: a request's times are
shifted to the other machine's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import NamedTuple

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.process.worker import (
    Add,
    Command,
    EngineOrder,
    Ready,
    Refused,
    Token,
    Worker,
    WorkerMessage,
)
from ridgeline.engine.scheduling.state import End, Stats
from ridgeline.errors import RidgelineError
from ridgeline.models.checkpoint import resolve_model
from ridgeline.parallel.starting.ray_cluster import load_ray

log = logging.getLogger(__name__)

POLL_S = 0.5  # that the other end waits for news
NO_STATS = Stats(*(0 for _ in Stats._fields))


class News(NamedTuple):
    """What an actor reports at once."""

    messages: list[WorkerMessage]
    progress: EngineProgress
    stats: Stats
    in_steps: set[int]
    death: str | None  # why the engine's process has died, if it has


class Host:
    """The actor. Commands are obeyed in their order, by a thread of their own."""

    def __init__(self, model: str, order: EngineOrder) -> None:
        try:
            path = resolve_model(model)  # on this machine
            self._worker: Worker | None = Worker(replace(order, model=path))
        except RidgelineError as error:
            self._worker, self._refusal = None, error

    def send(self, command: Command, sent_at: float) -> None:
        if self._worker is not None:
            self._worker.send(_moved(command, time.monotonic() - sent_at))

    def receive(self, seconds: float) -> News:
        if self._worker is None:
            return News([Refused(self._refusal)], EngineProgress(0, 0.0, 0.0), NO_STATS, set(), "")
        messages = self._worker.receive(seconds)
        beat = self._worker.heartbeat
        death = self._worker.bury() if messages is None else None
        return News(messages or [], beat.progress, beat.stats, beat.in_steps(), death)


def _moved(command: Command, seconds: float) -> Command:
    """With times by a clock that is so much ahead."""
    if not isinstance(command, Add):
        return command
    ask = command.ask
    deadline = None if ask.deadline is None else ask.deadline + seconds
    return command._replace(ask=replace(ask, arrival=ask.arrival + seconds, deadline=deadline))


class RemoteHeartbeat:
    """As engine/process/heartbeat.py has it, from the last news."""

    def __init__(self) -> None:
        progress = EngineProgress(0, 0.0, 0.0)
        self._news, self._noted_at = News([], progress, NO_STATS, set(), None), time.monotonic()

    def note(self, news: News) -> None:
        self._news, self._noted_at = news._replace(messages=[]), time.monotonic()

    @property
    def progress(self) -> EngineProgress:
        progress = self._news.progress
        return progress._replace(idle_s=progress.idle_s + time.monotonic() - self._noted_at)

    @property
    def stats(self) -> Stats:
        return self._news.stats

    def in_steps(self) -> set[int]:
        return self._news.in_steps


@dataclass(frozen=True)
class Needs:
    """What Ray reserves for one replica."""

    num_cpus: float
    num_gpus: float


class RayWorker:
    """Plays the part of `Worker`."""

    def __init__(self, model: str, order: EngineOrder, needs: Needs) -> None:
        self._ray = load_ray()
        groups = {"commands": 1, "news": 1}
        host = self._ray.remote(
            num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, concurrency_groups=groups
        )(Host)
        self._actor = host.remote(model, order)
        self._send = self._actor.send.options(concurrency_group="commands")
        self._receive = self._actor.receive.options(concurrency_group="news")
        self.heartbeat = RemoteHeartbeat()
        self.is_ready = self.has_answered = self._is_dead = self._is_closed = False
        self._reason = ""
        self._news: deque[News] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, name="replica", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Can be read when there is news."""
        return self._reader

    def send(self, command: Command) -> None:
        if not self._is_dead:
            self._send.remote(command, time.monotonic())

    def wait(self, others: Sequence[int], seconds: float) -> None:
        wait([self._reader, *others], seconds)

    def receive(self, seconds: float) -> list[WorkerMessage] | None:
        """What has come, waited for up to so long; None when it has died."""
        if not self._news and not self._is_dead:
            self.wait((), seconds)
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        messages: list[WorkerMessage] = []
        while self._news:
            news = self._news.popleft()
            self.heartbeat.note(news)
            messages += news.messages
        for message in messages:
            self.is_ready = self.is_ready or isinstance(message, Ready)
            self.has_answered = self.has_answered or isinstance(message, (Token, End))
            if isinstance(message, Refused):
                self._reason = str(message.error)
        return messages if messages or not self._is_dead else None

    def kill(self) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(self._actor)

    def bury(self) -> str:
        self.close()
        return self._reason or "its replica is gone"

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _listen(self) -> None:
        """The thread: news as it comes, until there is no more."""
        while not self._is_dead:
            try:
                news: News = self._ray.get(self._receive.remote(POLL_S))
            except Exception as error:  # Ray's: the actor, its machine or the cluster is gone
                self._reason = self._reason or f"its replica is gone: {_first_line(error)}"
                self._is_dead = True
            else:
                self._news.append(news)
                if news.death is not None:
                    self._reason = self._reason or news.death
                    self._is_dead = True
            with suppress(BlockingIOError, OSError):
                os.write(self._writer, b"!")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
