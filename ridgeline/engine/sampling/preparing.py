"""Requests whose grammars are being compiled, before the scheduler hears of them: the others run on
meanwhile. They end here if they are cancelled, their time is up, or their grammar is wrong.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import NamedTuple

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
        self._waiting: dict[Hashable, tuple[Ask, LiveRequest, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._waiting

    def add(self, ask: Ask, live: LiveRequest) -> None:
        grammar = live.job.sampling.grammar
        assert grammar is not None, f"request {ask.request_id!r} has no grammar to wait for"
        assert self._grammars is not None, "a request with a grammar comes with a tokenizer"
        self._waiting[ask.request_id] = (ask, live, self._grammars.compile(grammar))

    def follow_thinking(self, live: LiveRequest) -> None:
        """There is nothing to wait for where a limit to its thinking is all that is followed."""
        assert self._grammars is not None, "a request that thinks comes with a tokenizer"
        live.job = _followed(live.job, self._grammars, None)

    def cancel(self, request_id: Hashable) -> Prepared | None:
        """Take a request out; None if it is not here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        return Prepared(waiting[0], waiting[1], End(request_id, "cancelled", "cancelled"))

    def take(self, now: float) -> list[Prepared]:
        """Those that wait no longer."""
        taken = [
            self._prepared(ask, live, future, now)
            for ask, live, future in self._waiting.values()
            if future.done() or _is_overdue(ask, now)
        ]
        for prepared in taken:
            del self._waiting[prepared.ask.request_id]
        return taken

    def wait(self, seconds: float) -> None:
        """Until one is ready, or so long."""
        wait([future for _, _, future in self._waiting.values()], seconds, FIRST_COMPLETED)

    def _prepared(
        self, ask: Ask, live: LiveRequest, future: Future[CompiledGrammar], now: float
    ) -> Prepared:
        if _is_overdue(ask, now):
            reason = f"its deadline of {ask.deadline} passed"
            return Prepared(ask, live, End(ask.request_id, "cancelled", reason))
        error = future.exception()
        if error is not None:
            return Prepared(ask, live, End(ask.request_id, "failed", str(error)))
        job, grammars = live.job, self._grammars
        assert grammars is not None, "it compiled the grammar"
        live.job = _followed(job, grammars, future.result())
        return Prepared(ask, live, None)


def _followed(job: DeviceJob, grammars: Grammars, compiled: CompiledGrammar | None) -> DeviceJob:
    matchers = [
        matcher_for(grammars, compiled, job.sampling, job.stop_ids)
        for _ in range(job.sampling.num_samples)
    ]
    return replace(job, matchers=tuple(matchers))


def _is_overdue(ask: Ask, now: float) -> bool:
    return ask.deadline is not None and ask.deadline <= now
