"""Who is compiled next, by numbers alone; and the process that compiles, with real grammars."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest
from live_server import until
from slow_grammars import slow_grammar
from tiny_tokenizers import byte_level_metadata

from ridgeline.data import Tokenizer
from ridgeline.engine import Grammar
from ridgeline.engine.grammars import compile_process
from ridgeline.engine.grammars.compile_process import (
    NUM_IDLE,
    BeginCompile,
    Compiled,
    VocabularyLoaded,
)
from ridgeline.engine.grammars.compile_queue import TURNS_S, CompileLimits, CompileQueue, Turns
from ridgeline.engine.grammars.compilers import Compilers, GrammarVocabulary, _failed
from ridgeline.errors import GrammarError, RequestError

TINY = Grammar.choice(["yes", "no"])
SLOW_S = TURNS_S[-1]


def queue_of(num: int, tenants: str = "a", **limits: float) -> CompileQueue:
    """With so many jobs of each tenant, numbered by tens."""
    queue = CompileQueue(CompileLimits(**limits))  # type: ignore[arg-type]
    for tenth, tenant in enumerate(tenants):
        for number in range(num):
            queue.add(10 * tenth + number, tenant, 0.0)
    return queue


def run(
    queue: CompileQueue, until_s: float, step_s: float = 0.01, begin: float = 0.0
) -> list[tuple[float, Turns]]:
    """What it says at each step that says anything."""
    heard = []
    for step in range(round(until_s / step_s) + 1):
        turns = queue.advance(begin + step * step_s)
        if any(vars(turns).values()):
            heard.append((begin + step * step_s, turns))
    return heard


def test_a_new_one_goes_before_those_that_had_a_turn() -> None:
    queue = queue_of(10, num_running=1)
    run(queue, 2.0)
    queue.add(99, "a", 2.0)
    turns = queue.advance(2.0)
    assert turns.begun == [99]
    assert len(turns.stopped) == 1
    queue.remove(99)  # it is done
    assert len(queue.advance(2.01).continued) == 1


def test_first_turns_are_short() -> None:
    """Ten that come at once delay the next by ten short turns, not by their whole time."""
    queue = queue_of(10, num_running=1)
    queue.add(99, "a", 0.0)
    begun = {number: now for now, turns in run(queue, 2.0) for number in turns.begun}
    assert begun[99] <= 11 * (TURNS_S[0] + 0.01)


def test_keys_take_turns() -> None:
    """A key with one slow grammar gets half of the time beside one with four."""
    queue = queue_of(4, timeout_s=100.0)
    queue.add(10, "b", 0.0)
    run(queue, 20.0)
    spent = {job.number: job.spent_s for job in queue._jobs.values()}
    mine, theirs = spent.pop(10), spent
    assert mine == pytest.approx(sum(theirs.values()), rel=0.1)
    assert min(theirs.values()) > 0.5 * max(theirs.values())


def test_slow_ones_run_one_at_a_time_and_leave_room() -> None:
    queue = queue_of(3)
    run(queue, 3.0)
    assert sum(job.is_running for job in queue._jobs.values()) == 1
    queue.add(99, "a", 3.0)
    turns = queue.advance(3.0)
    assert (turns.begun, turns.stopped) == ([99], [])


def test_too_long_and_too_many() -> None:
    queue = queue_of(6, timeout_s=2.0, max_slow_per_tenant=4)
    heard = run(queue, 30.0)
    crowded = [number for _, turns in heard for number in turns.crowded]
    overdue = [number for _, turns in heard for number in turns.overdue]
    assert len(crowded) == 2
    assert sorted(crowded + overdue) == list(range(6))
    assert not queue
    assert queue.wait_s() is None
    queue = queue_of(3, tenants="abc", max_slow=4)
    run(queue, 9 * SLOW_S)
    assert len(queue) == 4
    assert {job.tenant for job in queue._jobs.values()} == set("abc")


def test_who_waits_too_long_behind_others_is_one_too_many() -> None:
    queue = queue_of(4, timeout_s=30.0, in_all_s=10.0)
    heard = run(queue, 60.0)
    ended = {number: at for at, turns in heard for number in turns.crowded}
    assert sorted(ended) == list(range(4))
    assert all(10.0 < at < 12.0 for at in ended.values())
    assert not any(turns.overdue for _, turns in heard)


def test_waiting_in_an_engine_that_died_counts() -> None:
    queue = CompileQueue(CompileLimits(timeout_s=30.0, in_all_s=10.0))
    queue.add(1, "a", now=100.0, since=92.0)
    heard = run(queue, 60.0, begin=100.0)
    assert [(number, round(at)) for at, turns in heard for number in turns.crowded] == [(1, 102)]


def test_it_says_when_to_come_again() -> None:
    queue = queue_of(2, timeout_s=3.0)
    now = 0.0
    for _ in range(100):
        queue.advance(now)
        wait_s = queue.wait_s()
        if wait_s is None:
            break
        now += wait_s
    assert not queue
    assert now == pytest.approx(6.0, rel=0.3)


@pytest.fixture(scope="module")
def compilers() -> Compilers:
    return Compilers()


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("smollm"))
    return GrammarVocabulary(
        lambda: [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    )


def children_of(compilers: Compilers) -> dict[int, tuple[str, float]]:
    """By their ids: the state (T is halted), and seconds of work."""
    process = compilers._process
    if process is None:
        return {}
    pid, tick = process.process.pid, os.sysconf("SC_CLK_TCK")
    children = {}
    with suppress(OSError):  # it has just died
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            children[int(child)] = (fields[0], (int(fields[11]) + int(fields[12])) / tick)
    return children


def busy_child(compilers: Compilers) -> int | None:
    """One that has worked for a while; those that were forked just now have not."""
    children = children_of(compilers).items()
    return next((pid for pid, (state, seconds) in children if state == "R" and seconds > 0.1), None)


def test_processes_are_halted_and_killed(
    compilers: Compilers, vocabulary: GrammarVocabulary
) -> None:
    assert compilers.submit(vocabulary, TINY, 1).result(60) is not None  # all is loaded
    slow = [compilers.submit(vocabulary, slow_grammar(number), 1) for number in range(3)]
    assert compilers.submit(vocabulary, TINY, 1).result(60) is not None
    assert not any(task.done() for task in slow)
    compilers.abandon(slow[0])  # nobody waits for it
    until(lambda: compilers.num_pending == 2, 60)
    compilers.limits = CompileLimits(timeout_s=1.0)
    with pytest.raises(GrammarError, match="not closed"):
        compilers.submit(vocabulary, Grammar.regex("((("), 1).result(60)  # it looks again
    for task in slow[1:]:
        with pytest.raises(GrammarError, match=r"cannot be followed: .* longer than 1 s"):
            task.result(60)
    until(lambda: len(children_of(compilers)) == NUM_IDLE, 60)
    assert "T" not in {state for state, _ in children_of(compilers).values()}


def test_a_key_with_too_many_slow_ones_is_told(
    compilers: Compilers, vocabulary: GrammarVocabulary
) -> None:
    compilers.limits = CompileLimits(max_slow_per_tenant=1)
    tasks = [compilers.submit(vocabulary, slow_grammar(10 + number), 1, "a") for number in range(2)]
    until(lambda: any(task.done() for task in tasks), 60)
    for task in tasks:
        if task.done():
            with pytest.raises(GrammarError, match="more than 1 grammars that are slow"):
                task.result()
        else:
            compilers.abandon(task)


def test_the_compiling_process_may_die(compilers: Compilers, vocabulary: GrammarVocabulary) -> None:
    """A child that dies fails its own grammar; when all die what was there begins again, once."""
    compilers.limits = CompileLimits()
    until(lambda: compilers.num_pending == 0 and busy_child(compilers) is None, 60)
    task = compilers.submit(vocabulary, slow_grammar(20), 1)
    until(lambda: busy_child(compilers) is not None, 60)
    pid = busy_child(compilers)
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(GrammarError, match=r"the compiler failed on it \(SIGSEGV\)"):
        task.result(60)
    told = _failed(TINY, Compiled(1, died="SIGABRT"))
    assert "failed on it (SIGABRT, as where memory is short)" in str(told)
    task = compilers.submit(vocabulary, slow_grammar(21), 1)
    for num_starts in (1, 2):
        until(lambda: task.num_starts == num_starts and busy_child(compilers) is not None, 60)  # noqa: B023
        assert compilers._process is not None
        compilers._process.process.kill()
    with pytest.raises(RequestError, match="died twice"):
        task.result(60)
    assert compilers.submit(vocabulary, TINY, 1).result(60) is not None


def test_who_waits_too_long_for_the_second_compiling_is_told(
    compilers: Compilers, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be interrupted: who is compiled, and who waits behind it, hear all the same."""
    compilers.limits = CompileLimits()
    release, hear = Event(), compilers._hear

    def as_slow(message: VocabularyLoaded | Compiled) -> None:
        """Nobody knows when what really is slow is done beside others: it makes way for them."""
        hear(message._replace(is_quick=False) if isinstance(message, Compiled) else message)

    def stuck(*_: object) -> object:
        assert release.wait(60)
        return object()

    monkeypatch.setattr(compilers, "_hear", as_slow)
    with monkeypatch.context() as patched:
        patched.setattr("ridgeline.engine.grammars.compilers.compile_here", stuck)
        tasks = [compilers.submit(vocabulary, TINY, 1) for _ in range(2)]
        until(lambda: len(compilers._finishing) == 2, 60)
        assert not any(task.done() for task in tasks)
        compilers.limits = CompileLimits(in_all_s=0.5)
        compilers.submit(vocabulary, Grammar.regex("((("), 1)  # it looks again
        for task in tasks:
            with pytest.raises(GrammarError, match="slow to compile at once; try again later"):
                task.result(60)
        release.set()
    compilers.limits = CompileLimits()
    assert compilers.submit(vocabulary, TINY, 1).result(60) is not None


@pytest.mark.parametrize(("limit_s", "letter"), [(60.0, b"C"), (-1.0, b"c")])
def test_who_took_long_says_so_and_ends(
    limit_s: float, letter: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_process, "QUICK_S", limit_s)
    monkeypatch.setattr(compile_process, "compile_with", lambda *_: None)
    reader, writer = os.pipe()
    goes_on = compile_process._answer(BeginCompile(1, 1, TINY, 1), {1: None}, writer)
    os.close(writer)
    with open(reader, "rb") as said:
        assert said.read(1) == letter
    assert goes_on == letter.isupper()


def test_an_own_process_loads_xgrammar_without_transformers() -> None:
    """And matches with it; nothing of what stood for it is left."""
    program = (
        "import sys, numpy; from ridgeline.engine.grammars import library; "
        "library.in_own_process(); lib = library.library(); "
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules; "
        "info = lib.tokenizer_info.TokenizerInfo([b'a', b'b'], stop_token_ids=[]); "
        "compiled = lib.compiler.GrammarCompiler(info).compile_regex('a'); "
        "matcher = lib.matcher.GrammarMatcher(compiled); mask = numpy.zeros((1, 1), numpy.int32); "
        "matcher.fill_next_token_bitmask(mask); "
        "print(mask[0, 0] & 3, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("1 False", 0), done.stderr


def test_a_segmentation_fault_ends_a_process_that_has_loaded_xgrammar() -> None:
    """By the handler that was there before: xgrammar's own may wait in malloc for ever."""
    program = (
        "import faulthandler, os, signal; from ridgeline.engine.grammars import library; "
        "faulthandler.enable(); library.in_own_process(); library.library(); "
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault"), done.stderr
