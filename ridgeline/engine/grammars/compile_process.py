"""The process in which grammars are compiled: it loads xgrammar and the vocabulary once, and forks
those that compile, so that each can be halted or killed at any time and what it took is given back.

It holds no model and no requests, ends with the process that started it, and has its own memory
limit. `serve` is its main function; compilers.py is the other end, which compiles once more what
was compiled here: how long that takes is then known, and what xgrammar writes of a compiled grammar
can be 170 MB, which take seventeen seconds to write and read where compiling takes half a second.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn

from ridgeline.engine.grammars.library import in_own_process, library
from ridgeline.engine.requests.grammar import Grammar

ANY_OBJECT = '{"type": "object"}'
MAX_BYTES = 1 << 30  # of memory for compiling one grammar
# Of a core: a grammar that took longer makes way where it is compiled again, or it would slow the
# engine's steps; the process that had it may have grown, and ends.
QUICK_S = 0.05
PIECE = 1 << 20
PR_SET_PDEATHSIG = 1
HEAD = struct.Struct(">cQ")  # of what a child says: a kind, and how many bytes follow
NO_MEMORY = "compiling it needs too much memory"
NUM_IDLE = 2  # processes that wait for a grammar
NICENESS = 19  # of what is compiled beside an engine


class LoadVocabulary(NamedTuple):
    """A tokenizer's tokens, as bytes; it is kept under its number."""

    number: int
    pieces: list[bytes]


class ForgetVocabulary(NamedTuple):
    number: int


class BeginCompile(NamedTuple):
    job: int
    vocabulary: int
    grammar: Grammar
    max_whitespace: int


class SignalCompile(NamedTuple):
    """SIGSTOP, SIGCONT or SIGKILL for a job."""

    job: int
    signal: int


class SlowCompile(NamedTuple):
    """The job makes way for others from now on."""

    job: int


class VocabularyLoaded(NamedTuple):
    number: int


class Compiled(NamedTuple):
    """How a job ended: it can be compiled, or there is a reason why not, or its process died."""

    job: int
    is_quick: bool = True
    reason: str = ""
    died: str = ""  # by which signal


CompileOrder = LoadVocabulary | ForgetVocabulary | BeginCompile | SignalCompile | SlowCompile


def compiler_for(pieces: list[bytes]) -> Any:
    """xgrammar's compiler for a vocabulary."""
    compiler, tokenizer_info = library()
    info = tokenizer_info.TokenizerInfo(
        pieces, tokenizer_info.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=[]
    )
    num_threads = max(1, (os.cpu_count() or 1) // 4)  # the others are for whoever runs
    return compiler.GrammarCompiler(info, max_threads=min(8, num_threads), cache_enabled=False)


def compile_with(compiler: Any, grammar: Grammar, max_whitespace: int) -> Any:
    """xgrammar's CompiledGrammar; a RuntimeError for what it cannot read."""
    match grammar.kind:
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choices)
            return compiler.compile_grammar(f"root ::= {' | '.join(texts)}")
        case "structural_tag":
            return compiler.compile_structural_tag(grammar.text)
        case "json_schema" | "json_object":
            schema = grammar.text or ANY_OBJECT
            return compiler.compile_json_schema(schema, max_whitespace_cnt=max_whitespace)


def run_when_idle(thread: int) -> None:
    """Run only where nobody else wants to. Niceness alone is not enough: threads that work for less
    than a millisecond at a time, as those of an engine on a CPU do, are then woken on the core
    where they are, and wait for each other there.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def reason_in(message: str) -> str:
    """xgrammar's message without the time and the place in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+: (Check failed: .* is false: )?", "", message.strip())
    return " ".join(text.split())[:300].rstrip(".")


class CompileChild:
    """A process that was forked, and what it has said of the job that it has."""

    def __init__(self, compilers: Mapping[int, Any], to_close: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self.job: int | None = None
        self._received = bytearray()
        self.pid = os.fork()
        if not self.pid:
            _be_child(compilers, Connection(theirs.detach()), [*to_close, ours.detach()])
        theirs.close()
        self._connection = Connection(ours.detach())

    def fileno(self) -> int:
        return self._connection.fileno()

    def begin(self, order: BeginCompile) -> None:
        self.job = order.job
        with suppress(OSError):  # it has died, as `read` tells
            self._connection.send(order)

    def read(self) -> tuple[bytes, bytes] | None:
        """What it said of its job once all of that is here: a kind and a text. C is for compiled
        and E for an error, small letters for the last it does; none is its death. Never waits for
        more: one that is halted says nothing.
        """
        piece = b""
        with suppress(ConnectionError):
            piece = os.read(self.fileno(), PIECE)
        if not piece:
            return b"", b""
        self._received += piece
        kind, size = HEAD.unpack(self._received[: HEAD.size].ljust(HEAD.size, b"\0"))
        if len(self._received) < HEAD.size or len(self._received) < HEAD.size + size:
            return None
        text = bytes(self._received[HEAD.size :])
        self._received.clear()
        return kind, text

    def send_signal(self, number: int) -> None:
        """Only this process reaps it, so its id is still its own."""
        os.kill(self.pid, number)

    def make_way(self) -> None:
        with suppress(OSError):  # it ends just now
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                run_when_idle(int(thread))

    def bury(self) -> str:
        """What it died of."""
        self._connection.close()
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _be_child(
    compilers: Mapping[int, Any], connection: Connection, to_close: Sequence[int]
) -> NoReturn:
    """What was forked, to its end: nothing of the other process's is run by it."""
    code = 1
    try:
        for fd in to_close:
            os.close(fd)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_memory()
        with suppress(EOFError, OSError):  # the other process has ended, or has enough of them
            while _answer(connection.recv(), compilers, connection.fileno()):
                pass
        code = 0
    finally:
        os._exit(code)


def _answer(order: BeginCompile, compilers: Mapping[int, Any], fd: int) -> bool:
    """Compile one grammar. Whether there may be another: who has grown large ends."""
    began = time.process_time()
    kind, text, is_quick = b"C", "", True
    try:
        compile_with(compilers[order.vocabulary], order.grammar, order.max_whitespace)
        is_quick = time.process_time() - began <= QUICK_S
    except MemoryError:
        kind, text = b"E", NO_MEMORY
    except RuntimeError as error:  # what xgrammar raises for all that it cannot read
        reason = NO_MEMORY if "bad_alloc" in str(error) else reason_in(str(error))
        kind, text = b"E", reason
    goes_on, data = is_quick and text != NO_MEMORY, text.encode()
    view = memoryview(HEAD.pack(kind if goes_on else kind.lower(), len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]
    return goes_on


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # elsewhere than on Linux there is no such file
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[5])
        limit = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class CompileServer:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        library()
        self._compilers: dict[int, Any] = {}  # by vocabulary
        self._children: dict[int, CompileChild] = {}  # those with a job, by job
        self._idle: list[CompileChild] = []  # forked ahead: a fork takes 10 ms

    def run(self) -> None:
        while True:
            if not self._connection.poll(0):  # nobody waits for us now
                self._refill()
            everybody = [self._connection, *self._children.values(), *self._idle]
            for ready in wait(everybody):  # type: ignore[arg-type]
                if isinstance(ready, CompileChild):
                    self._hear(ready)
                else:
                    self._obey(self._connection.recv())

    def end(self) -> None:
        for child in (*self._children.values(), *self._idle):
            child.send_signal(signal.SIGKILL)

    def _refill(self) -> None:
        while self._compilers and len(self._idle) < NUM_IDLE:
            self._idle.append(self._fork())

    def _fork(self) -> CompileChild:
        others = [child.fileno() for child in (*self._children.values(), *self._idle)]
        return CompileChild(self._compilers, [self._connection.fileno(), *others])

    def _renew(self) -> None:
        """Those that wait know other vocabularies than there are now."""
        gc.freeze()  # a child that collects would copy all pages
        for child in self._idle:
            child.send_signal(signal.SIGKILL)
            child.bury()
        self._idle.clear()
        self._refill()

    def _hear(self, child: CompileChild) -> None:
        message = child.read()
        if message is None:
            return
        job, (kind, text) = child.job, message
        child.job = None
        if job is None:  # an idle one has died
            self._idle.remove(child)
            child.bury()
            return
        del self._children[job]
        if not kind:
            self._connection.send(Compiled(job, died=child.bury()))
            return
        self._connection.send(Compiled(job, kind.isupper(), text.decode()))
        if kind.isupper() and len(self._idle) < NUM_IDLE:
            child.send_signal(signal.SIGCONT)  # it may have been halted when it had just spoken
            self._idle.append(child)
        else:
            child.send_signal(signal.SIGKILL)
            child.bury()

    def _obey(self, order: CompileOrder) -> None:
        match order:
            case LoadVocabulary(number, pieces):
                self._compilers[number] = compiler_for(pieces)
                self._renew()
                self._connection.send(VocabularyLoaded(number))
            case ForgetVocabulary(number):
                self._compilers.pop(number, None)
                self._renew()
            case BeginCompile(job):
                child = self._idle.pop() if self._idle else self._fork()
                self._children[job] = child
                child.begin(order)
            case SignalCompile(job, number):
                if job in self._children:
                    self._children[job].send_signal(number)
            case SlowCompile(job):
                if job in self._children:
                    self._children[job].make_way()


def serve(fd: int) -> None:
    """The process, from its start to its end."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # it goes on while the other one does
        signal.signal(number, signal.SIG_IGN)
    in_own_process()
    server = CompileServer(Connection(fd))
    with suppress(EOFError, OSError):  # nobody is there any more
        server.run()
    server.end()
