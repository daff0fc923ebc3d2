"""Requests whose grammars are being compiled, before the scheduler hears of them: the others run on
meanwhile. They end here if they are cancelled, their time is up, or their grammar is wrong; with
the last that waits for a grammar its compiling ends.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import NamedTuple

from ridgeline.engine.grammars.compilers import CompileTask
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.sampling.matching import CompiledGrammar, Grammars
from ridgeline.engine.sampling.thinking import matcher_for
from ridgeline.engine.scheduling.state import Ask, End


class Prepared(NamedTuple):
    """A request that is ready, or has ended."""

    ask: Ask
    live: LiveRequest
    end: End | None


class Preparing:
    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[Hashable, tuple[Ask, LiveRequest, CompileTask]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._waiting

    def add(self, ask: Ask, live: LiveRequest) -> None:
        grammar = live.job.sampling.grammar
        assert grammar is not None, f"request {ask.request_id!r} has no grammar to wait for"
        assert self._grammars is not None, "a request with a grammar comes with a tokenizer"
        task = self._grammars.compile(grammar, ask.tenant, ask.arrival or None)
        self._waiting[ask.request_id] = (ask, live, task)

    def follow_thinking(self, live: LiveRequest) -> None:
        """There is nothing to wait for where a limit to its thinking is all that is followed."""
        assert self._grammars is not None, "a request that thinks comes with a tokenizer"
        live.job = _followed(live.job, self._grammars, None)

    def cancel(self, request_id: Hashable) -> Prepared | None:
        """Take a request out; None if it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        ask, live, task = waiting
        self._leave(task)
        return Prepared(ask, live, End(request_id, "cancelled", "cancelled"))

    def take(self, now: float) -> list[Prepared]:
        """Those that wait no longer."""
        taken = [
            (self._prepared(ask, live, task, now), task)
            for ask, live, task in self._waiting.values()
            if task.done() or _is_overdue(ask, now)
        ]
        for prepared, task in taken:
            del self._waiting[prepared.ask.request_id]
            self._leave(task)
        return [prepared for prepared, _ in taken]

    def wait(self, seconds: float) -> None:
        """Until one is ready, or so long."""
        wait([task for _, _, task in self._waiting.values()], seconds, FIRST_COMPLETED)

    def _leave(self, task: CompileTask) -> None:
        assert self._grammars is not None, "it compiled the grammar"
        self._grammars.leave(task)

    def _prepared(self, ask: Ask, live: LiveRequest, task: CompileTask, now: float) -> Prepared:
        if _is_overdue(ask, now):
            reason = f"its deadline of {ask.deadline} passed"
            return Prepared(ask, live, End(ask.request_id, "cancelled", reason))
        error = task.exception()
        if error is not None:
            return Prepared(ask, live, End(ask.request_id, "failed", str(error)))
        job, grammars = live.job, self._grammars
        assert grammars is not None, "it compiled the grammar"
        live.job = _followed(job, grammars, task.result())
        return Prepared(ask, live, None)


def _followed(job: DeviceJob, grammars: Grammars, compiled: CompiledGrammar | None) -> DeviceJob:
    matchers = [
        matcher_for(grammars, compiled, job.sampling, job.stop_ids)
        for _ in range(job.sampling.num_samples)
    ]
    return replace(job, matchers=tuple(matchers))


def _is_overdue(ask: Ask, now: float) -> bool:
    return ask.deadline is not None and ask.deadline <= now
