"""Compiles grammars in a process of its own, which is started when the first one comes.

Whoever asks gets a future. One thread here decides by compile_queue.py who is compiled now, and
tells the process (compile_process.py) to begin, halt, continue or kill. A grammar that nobody waits
for any more is killed at once; one that takes too long, or dies, fails alone.

    compilers = shared_compilers()
    task = compilers.submit(vocabulary, grammar, max_whitespace=20, tenant="key-1f0a")
    task.result()               # xgrammar's CompiledGrammar, or a GrammarError
    compilers.abandon(task)     # nobody waits for it
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from ridgeline.engine.grammars.compile_process import (
    BeginCompile,
    Compiled,
    CompileOrder,
    ForgetVocabulary,
    LoadVocabulary,
    SignalCompile,
    SlowCompile,
    VocabularyLoaded,
    compile_with,
    compiler_for,
    reason_in,
    run_when_idle,
)
from ridgeline.engine.grammars.compile_queue import CompileLimits, CompileQueue, Turns
from ridgeline.engine.grammars.library import library
from ridgeline.engine.requests.grammar import Grammar
from ridgeline.errors import GrammarError, RequestError

log = logging.getLogger(__name__)

MAX_VOCABULARIES = 4  # that the process keeps
MAX_STARTS = 2  # of a job, where the whole process dies
END_S = 5.0
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ridgeline.engine.grammars.compile_process import serve; serve(int(sys.argv[1]))"
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class CompileTask(Future[Any]):
    """A grammar that is being compiled."""

    def __init__(
        self, number: int, vocabulary: GrammarVocabulary, grammar: Grammar, max_whitespace: int,
        tenant: str, since: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.number, self.vocabulary, self.grammar = number, vocabulary, grammar
        self.max_whitespace, self.tenant, self.num_starts = max_whitespace, tenant, 0
        self.is_abandoned, self.since = False, since

    def end_with(self, result: Any) -> None:
        """A compiled grammar or why there is none, unless it has ended already."""
        with suppress(InvalidStateError):
            if isinstance(result, Exception):
                self.set_exception(result)
            else:
                self.set_result(result)


class GrammarVocabulary:
    """The texts of a model's tokens, and xgrammar's compiler for them in this process."""

    _numbers = count(1)

    def __init__(self, pieces: Callable[[], list[bytes]]) -> None:
        self.number = next(self._numbers)
        self._make_pieces = pieces
        self._lock = threading.Lock()
        self._pieces: list[bytes] | None = None
        self._compiler: Any = None

    @property
    def pieces(self) -> list[bytes]:
        with self._lock:
            if self._pieces is None:
                self._pieces = self._make_pieces()
            return self._pieces

    def compiler(self) -> Any:
        """Made by the thread that first needs it: xgrammar takes a while to import."""
        pieces = self.pieces
        with self._lock:
            if self._compiler is None:
                self._compiler = compiler_for(pieces)
            return self._compiler


@dataclass
class CompilerProcess:
    """The process and what it has."""

    process: subprocess.Popen[bytes]
    connection: Connection
    sent: dict[int, bool] = field(default_factory=dict)  # vocabularies: whether they are loaded

    @classmethod
    def start(cls) -> CompilerProcess:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", START, str(theirs.fileno()), json.dumps(sys.path)]
        with ours, theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),),
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
            return cls(process, Connection(ours.detach()))

    def bury(self) -> int | None:
        """Its exit code; it is made to end where it does not by itself."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


class Compilers:
    """`submit` and `abandon` are for any thread."""

    def __init__(self, limits: CompileLimits | None = None) -> None:
        self._queue = CompileQueue(limits)
        self._tasks: dict[int, CompileTask] = {}  # all that have not ended
        self._loading: dict[int, CompileTask] = {}  # those whose vocabulary is being loaded
        self._finishing: deque[CompileTask] = deque()  # slow ones that are compiled again here
        self._process: CompilerProcess | None = None
        self._numbers = count(1)
        self._commands: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._slow_thread = ThreadPoolExecutor(
            1, thread_name_prefix="slow-grammar", initializer=_make_way
        )
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    @property
    def limits(self) -> CompileLimits:
        return self._queue.limits

    @limits.setter
    def limits(self, limits: CompileLimits) -> None:
        self._queue.limits = limits

    @property
    def num_pending(self) -> int:
        return len(self._tasks)

    def submit(
        self,
        vocabulary: GrammarVocabulary,
        grammar: Grammar,
        max_whitespace: int,
        tenant: str = "",
        since: float | None = None,
    ) -> CompileTask:
        """`since` when it is waited for, by time.monotonic(): in an engine before this one too."""
        since = time.monotonic() if since is None else since
        number = next(self._numbers)
        task = CompileTask(number, vocabulary, grammar, max_whitespace, tenant, since)
        self._tell(lambda: self._take(task))
        return task

    def abandon(self, task: CompileTask) -> None:
        """Nobody waits for it: it ends now."""
        task.is_abandoned = True
        task.cancel()
        self._tell(lambda: self._kill(task.number))

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._writer, b"\0")

    # The thread's side.

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except (EOFError, OSError):
                self._begin_anew()
            except Exception:
                log.exception("compiling grammars failed in an unforeseen way")
                self._begin_anew()

    def _turn(self) -> None:
        readable: list[Any] = [self._reader]
        if self._process is not None:
            readable.append(self._process.connection)
        ready = wait(readable, self._wait_s())
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        while self._commands:
            self._commands.popleft()()
        if self._process is not None and self._process.connection in ready:
            self._hear(self._process.connection.recv())
        self._obey(self._queue.advance(time.monotonic()))
        self._refuse_late(time.monotonic())

    def _wait_s(self) -> float | None:
        waits = [task.since + self.limits.in_all_s - time.monotonic() for task in self._finishing]
        if (until_turn := self._queue.wait_s()) is not None:
            waits.append(until_turn)
        return max(0.0, min(waits)) if waits else None

    def _refuse_late(self, now: float) -> None:
        """Those that wait too long for others, or take too long themselves, are told now: what is
        compiled here cannot be interrupted.
        """
        for task in list(self._finishing):
            is_late = now - task.since > self.limits.in_all_s
            if is_late:
                task.end_with(GrammarError(crowded_message(self.limits.max_slow_per_tenant)))
            if is_late or task.done():
                self._finishing.remove(task)

    def _take(self, task: CompileTask) -> None:
        if task.cancelled():
            return
        self._tasks[task.number] = task
        task.num_starts += 1
        if self._process is None:
            self._process = CompilerProcess.start()
        known, number = self._process.sent, task.vocabulary.number
        if known.get(number):
            known[number] = known.pop(number)  # used last
            self._queue.add(task.number, task.tenant, time.monotonic(), task.since)
            return
        self._loading[task.number] = task
        if number not in known:
            known[number] = False
            order = LoadVocabulary(number, task.vocabulary.pieces)
            self._threads.submit(task.vocabulary.compiler)  # this process needs it too
            self._send(order)

    def _hear(self, message: VocabularyLoaded | Compiled) -> None:
        if isinstance(message, VocabularyLoaded):
            self._note_loaded(message.number)
            return
        self._queue.remove(message.job)
        task = self._tasks.pop(message.job, None)
        if task is None or not task.set_running_or_notify_cancel():
            return
        if message.died or message.reason:
            task.set_exception(_failed(task.grammar, message))
        else:
            if not message.is_quick:
                self._finishing.append(task)
            (self._threads if message.is_quick else self._slow_thread).submit(_finish, task)

    def _note_loaded(self, number: int) -> None:
        assert self._process is not None, "it has just spoken"
        known = self._process.sent
        known[number] = True
        for task in [each for each in self._loading.values() if each.vocabulary.number == number]:
            del self._loading[task.number]
            self._queue.add(task.number, task.tenant, time.monotonic(), task.since)
        used = {task.vocabulary.number for task in self._tasks.values()}
        for oldest in [each for each in known if each not in used][: -MAX_VOCABULARIES or None]:
            if len(known) > MAX_VOCABULARIES:
                del known[oldest]
                self._send(ForgetVocabulary(oldest))

    def _obey(self, turns: Turns) -> None:
        for number in turns.stopped:
            self._send(SignalCompile(number, signal.SIGSTOP))
        for number in turns.slowed:
            self._send(SlowCompile(number))
        for number in turns.continued:
            self._send(SignalCompile(number, signal.SIGCONT))
        for number in turns.begun:
            task = self._tasks[number]
            order = BeginCompile(number, task.vocabulary.number, task.grammar, task.max_whitespace)
            self._send(order)
        seconds, most = self.limits.timeout_s, self.limits.max_slow_per_tenant
        for number in turns.overdue:
            reason = f"compiling it takes longer than {seconds:g} s, the limit; simplify it"
            self._kill(number, _wrong(self._tasks[number].grammar, reason))
        for number in turns.crowded:
            self._kill(number, GrammarError(crowded_message(most)))

    def _kill(self, number: int, error: Exception | None = None) -> None:
        self._queue.remove(number)
        self._loading.pop(number, None)
        task = self._tasks.pop(number, None)
        if task is None:
            return
        if self._process is not None:
            self._send(SignalCompile(number, signal.SIGKILL))
        if error is not None and task.set_running_or_notify_cancel():
            task.set_exception(error)

    def _send(self, order: CompileOrder) -> None:
        assert self._process is not None, "it was started for the first task"
        self._process.connection.send(order)

    def _begin_anew(self) -> None:
        """The process has died: what it had begins again in another one, though not for ever."""
        code = None if self._process is None else self._process.bury()
        log.warning("the process that compiles grammars died (code %s); starting another", code)
        self._process = None
        tasks, self._tasks = list(self._tasks.values()), {}
        self._loading.clear()
        for task in tasks:
            self._queue.remove(task.number)
            if task.num_starts < MAX_STARTS:
                self._tell(lambda task=task: self._take(task))  # type: ignore[misc]
            elif task.set_running_or_notify_cancel():
                task.set_exception(RequestError("the process that compiles grammars died twice"))


def _make_way() -> None:
    """This thread, and those that it starts, leave the processor to others."""
    with suppress(OSError):
        run_when_idle(threading.get_native_id())


def _finish(task: CompileTask) -> None:
    """Compile in this process what another one has shown to be compiled in time."""
    if task.done():
        return  # it has waited for others for too long
    try:
        if task.is_abandoned:
            raise _wrong(task.grammar, "nobody waits for it any more")
        task.end_with(compile_here(task.vocabulary, task.grammar, task.max_whitespace))
    except Exception as error:
        task.end_with(error)


def compile_here(vocabulary: GrammarVocabulary, grammar: Grammar, max_whitespace: int) -> Any:
    """xgrammar's CompiledGrammar, in this thread, however long that takes; or a GrammarError."""
    try:
        compiled = compile_with(vocabulary.compiler(), grammar, max_whitespace)
    except RuntimeError as error:  # what xgrammar raises for all that it cannot read
        raise _wrong(grammar, reason_in(str(error))) from error
    _check_matches(compiled, vocabulary, grammar)
    return compiled


def _check_matches(compiled: Any, vocabulary: GrammarVocabulary, grammar: Grammar) -> None:
    matcher = library().matcher.GrammarMatcher(compiled)
    mask = np.zeros((1, -(-len(vocabulary.pieces) // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(mask)
    if not (mask.any() or matcher.is_completed()):
        raise _wrong(grammar, "no text matches it")


def _wrong(grammar: Grammar, reason: str) -> GrammarError:
    return GrammarError(f"the {grammar.kind} cannot be followed: {reason}")


def _failed(grammar: Grammar, message: Compiled) -> GrammarError:
    if not message.died:
        return _wrong(grammar, message.reason)
    # What the system and C++ do then; a limit that was reached is told by its own reason.
    perhaps = ", as where memory is short" if message.died in ("SIGKILL", "SIGABRT") else ""
    return _wrong(grammar, f"the compiler failed on it ({message.died}{perhaps})")


def crowded_message(most: int) -> str:
    return f"more than {most} grammars that are slow to compile at once; try again later"


@cache
def shared_compilers() -> Compilers:
    """Those of this process: one process is enough for all its engines."""
    return Compilers()
