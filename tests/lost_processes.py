"""Faults for the engine's process, and a stand-in for that process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

from ridgeline.engine import Engine
from ridgeline.engine.execution.work import StepMeter
from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.engine.process.heartbeat import Heartbeat, WatchedRunner
from ridgeline.engine.process.worker import (
    Command,
    End,
    EngineOrder,
    Ready,
    Token,
    WorkerMessage,
    _obey,
)

DEADLY, SLOW = 45, 90  # positions; no request of a test reaches them but those that are meant to
STUCK_S = 1.5


def break_at_positions(engine: LocalBackend) -> None:
    """Lose the device at one position, or die there if a request is alone; be stuck at another."""
    forward = engine.runner.forward

    def breaking(inputs: Any, *rest: Any) -> torch.Tensor:
        positions = inputs.positions.tolist()
        if DEADLY in positions and max(positions) == DEADLY:
            if len(positions) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if SLOW in positions:
            time.sleep(STUCK_S)
        return forward(inputs, *rest)

    engine.runner.forward = breaking  # type: ignore[method-assign]


def lose_the_device(engine: LocalBackend) -> None:
    """A kernel that fails for good, as a GPU tells it: later, when somebody waits for the step."""
    forward = engine.runner.forward

    def losing(inputs: Any, *rest: Any) -> torch.Tensor:
        if DEADLY in inputs.positions.tolist():
            nothing = torch.zeros(4, device=engine.runner.device)
            nothing[torch.full((1,), 10**6, device=engine.runner.device)]
        return forward(inputs, *rest)

    engine.runner.forward = losing  # type: ignore[method-assign]


class Killed(BaseException):
    """What ends a stand-in: nothing in the engine catches it."""


Deadly = Callable[[int, list[int], int], bool]  # which process, a step's positions, its rows


class StandIn:
    """A Worker in this process. `deadly` says in which steps it dies."""

    def __init__(self, engine: Engine, number: int, deadly: Deadly) -> None:
        self.heartbeat = Heartbeat(get_context("spawn"))
        self.engine, self.loop = engine, engine.local.loop
        self.is_ready = self.has_answered = self.is_dead = False
        self.inbox: list[Command] = []
        self.outbox: list[WorkerMessage] = []
        self.meter = StepMeter(engine.runner.device)
        watched = WatchedRunner(engine.runner, self.heartbeat, self.meter)
        self.loop.runner = watched  # type: ignore[assignment]
        forward = engine.runner.forward

        def dying(inputs: Any, *rest: Any) -> torch.Tensor:
            if deadly(number, inputs.positions.tolist(), len(inputs.seats)):
                raise Killed
            return forward(inputs, *rest)

        engine.runner.forward = dying  # type: ignore[method-assign]

    @classmethod
    def maker(cls, make: Callable[[], Engine], deadly: Deadly) -> Callable[[EngineOrder], StandIn]:
        made: list[StandIn] = []

        def start(order: EngineOrder) -> StandIn:
            made.append(cls(make(), len(made), deadly))
            return made[-1]

        return start

    def send(self, command: Command) -> None:
        self.inbox.append(command)

    def receive(self, seconds: float) -> list[WorkerMessage] | None:
        if not self.is_ready:
            self.is_ready = True
            return [Ready(self.engine.local.wait_until_ready())]
        if self.is_dead:
            return None
        try:
            self._advance()
        except Killed:
            self.is_dead = True
        self.heartbeat.note(self.loop.progress, self.loop.scheduler.stats(), self.meter.work)
        found, self.outbox[:] = list(self.outbox), []
        self.has_answered = self.has_answered or any(
            isinstance(message, (Token, End)) for message in found
        )
        return found

    def _advance(self) -> None:
        """A step; commands reach it one step late."""
        if self.loop._preparing:
            self.loop._preparing.wait(
                30.0
            )  # so that requests with grammars are there from the start
        self.loop.advance()
        for command in self.inbox:
            _obey(self.loop, command, self.outbox, self.meter)
        self.inbox.clear()

    def bury(self) -> str:
        return "its process was killed by SIGKILL"

    def kill(self) -> None:
        self.is_dead = True

    close = kill
