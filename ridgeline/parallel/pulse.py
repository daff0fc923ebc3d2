"""A rank's sign of life: which step it is in, and what it waits for. Whoever looks after the ranks
reads it (starting/watch.py): the process that has started them, or under torchrun ranks 0 and 1.

Calls write into memory alone, so that thousands of them a step cost nothing that counts: a thread
sends what stands there to the store of all ranks every second, with the line of code that the main
thread is in. With `Pulse()` nobody is told anything.

    pulse = start_pulse(hang_after=None)            # in a rank; elsewhere a silent one
    pulse.doing("loading the model")
    with pulse.waiting("all_reduce over tensor with ranks 0, 1"):
        ...
    pulse.step(1)                                   # has ended
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import distributed

from ridgeline.errors import HardwareError
from ridgeline.parallel.starting.meeting import meet
from ridgeline.parallel.starting.place import RankNumbers, is_own_child, numbers_in
from ridgeline.parallel.starting.telling import write_error
from ridgeline.parallel.starting.watch import Beat, Hang, HangWatch, read_beats, write_beat

dist: Any = distributed  # whose stubs name only half of what it has

EVERY_S = 1.0  # between beats
LOOK_EVERY = 5  # beats between looks at all others', under torchrun
NUM_WATCHERS = 2  # ranks that look then: the first may be the one that is stuck
LATER = 1.5  # times as long the second of them waits
DUMP = "ridgeline/dump"  # with a rank behind it: it is to show where it stands
PACKAGE = str(Path(__file__).parents[1])


class Waiting:
    """While a rank waits for others."""

    __slots__ = ("_before", "_pulse", "_what")

    def __init__(self, pulse: Pulse, what: str) -> None:
        self._pulse, self._what = pulse, what
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._pulse.waits_for
        self._pulse.waits_for = self._what

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pulse.waits_for = self._before
        self._pulse.count += 1


class Pulse:
    """What a rank says of itself. Made in the thread that works."""

    def __init__(self) -> None:
        self.count = 0
        self.waits_for: str | None = None
        self._phase = ""
        self._step = 0
        self._slowest_s = 0.0
        self._ended_at: float | None = None
        self._thread = threading.get_ident()

    def step(self, number: int) -> None:
        """This step has ended."""
        now = time.perf_counter()
        if self._ended_at is not None:
            self._slowest_s = max(self._slowest_s, now - self._ended_at)
        self._ended_at, self._step, self._phase = now, number, ""
        self.count += 1

    def doing(self, what: str) -> None:
        """What lies between steps and takes long: loading, a measurement, a checkpoint. Each call
        is progress.
        """
        self._phase = what
        self.count += 1

    def waiting(self, what: str) -> Waiting:
        """For a `with`: what this rank cannot do alone. The collective, its axis and its ranks. It
        may be made once and entered often.
        """
        return Waiting(self, what)

    def beat(self, number: int) -> Beat:
        return Beat(
            number,
            self.count,
            self._step,
            self._slowest_s,
            self._phase,
            self.waits_for,
            line_of(self._thread),
        )


def line_of(thread: int) -> str:
    """The innermost line of Ridgeline's that a thread stands in, or of any code if it is in none:
    `ridgeline/training/run.py:210 in _launch`.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    innermost = frame
    while frame is not None and not _is_own(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "a thread that has ended"
    path = Path(frame.f_code.co_filename)
    name = str(path.relative_to(Path(PACKAGE).parent)) if _is_own(frame) else path.name
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_own(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(PACKAGE + os.sep) and name != __file__


def start_pulse(
    hang_after: float | None = None, environment: Mapping[str, str] = os.environ
) -> Pulse:
    """This process's, which is told to the others if it is a rank."""
    pulse, numbers = Pulse(), numbers_in(environment)
    if numbers is None:
        return pulse
    watch = None
    if not is_own_child(environment) and numbers.rank < NUM_WATCHERS:
        watch = HangWatch(numbers.size, hang_after, LATER**numbers.rank)
    sender = PulseSender(pulse, numbers, meet(numbers, environment), watch)
    sender.start()
    atexit.register(sender.stop)
    return pulse


class PulseSender:
    """The thread beside a rank's work."""

    def __init__(
        self, pulse: Pulse, numbers: RankNumbers, store: Any, watch: HangWatch | None
    ) -> None:
        self._pulse, self._numbers, self._store, self._watch = pulse, numbers, store, watch
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(2 * EVERY_S)

    def _run(self) -> None:
        number, rank = 0, self._numbers.rank
        try:
            while not self._is_over.wait(EVERY_S if number else 0):
                number += 1
                write_beat(self._store, rank, self._pulse.beat(number))
                if self._store.check([f"{DUMP}/{rank}"]):
                    faulthandler.dump_traceback(all_threads=True)
                    return
                if self._watch is not None and number % LOOK_EVERY == 0:
                    hang = self._watch.look(read_beats(self._store, self._numbers.size))
                    if hang is not None:
                        self._end_all(hang)
        except RuntimeError:  # the store has gone, and with it whoever would read this
            return

    def _end_all(self, hang: Hang) -> None:
        """As torchrun has it: a rank that fails ends the others."""
        for rank in hang.ranks:
            self._store.set(f"{DUMP}/{rank}", "")
        if self._numbers.rank in hang.ranks:
            faulthandler.dump_traceback(all_threads=True)
        time.sleep(2 * EVERY_S)  # until they have shown where they stand
        line = f"ridgeline: error: {hang.message}"
        with suppress(OSError, ValueError):  # by whichever rank has seen it
            print(line, file=sys.stderr, flush=True)
        write_error(hang.message)
        os._exit(HardwareError.exit_code)
