"""The process that has started the ranks of this machine, and looks after them until they end.

Rank 0 has this process's terminal, the others a log each. A rank that dies or hangs ends all, with
one line that says which and how. Ctrl-C is passed on once, so that every rank ends its step and
rank 0 saves; a second one ends all at once. If this process is killed, the ranks end by themselves
(child.py).

    order = RankOrder(["-m", "ridgeline", "train", …], size=4, local_size=4, logs=run / LOGS, …)
    ending = supervise(order, hang_after=None)
    ending.code, ending.message
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import INTERRUPTED_EXIT_CODE, HardwareError, OutputError
from ridgeline.parallel.starting.child import (
    STOP_S,
    child_environment,
    end_children,
    local_store,
    start_child,
)
from ridgeline.parallel.starting.endings import (
    INTERRUPTED,
    OWN_CODES,
    PASSING_CODES,
    Ending,
    RankEnd,
    judged,
    start_line,
)
from ridgeline.parallel.starting.interruption import interruption
from ridgeline.parallel.starting.meeting import of_start
from ridgeline.parallel.starting.place import (
    ERROR_FILE,
    LOG,
    PARENT,
    RankNumbers,
    loopback,
    rank_environment,
)
from ridgeline.parallel.starting.telling import read_error
from ridgeline.parallel.starting.watch import Hang, HangWatch, read_beats

POLL_S = 0.05
LOOK_S = 1.0  # between looks at the ranks' pulses
SETTLE_S = 1.0  # after a rank's end, for others that end by themselves
ALIKE_S = 5.0  # for those that are about to find the same bad input
LEAVE_S = 30.0  # after a Ctrl-C and the end of rank 0, which has saved
DUMP_S = 1.0  # for a rank to write where it stands
LOGS = "logs"  # in a run's folder
WELL = (0, *INTERRUPTED)  # how a rank ends that has not failed


@dataclass(frozen=True)
class RankOrder:
    """What is started on this machine."""

    words: Sequence[str]  # behind `python`
    size: int  # ranks on all machines
    local_size: int
    logs: Path
    num_threads: int
    node: int = 0
    address: str = "127.0.0.1"
    restarts: int = 0  # before this start
    max_restarts: int = 0

    @property
    def is_local(self) -> bool:
        return self.size == self.local_size

    def numbers(self, local_rank: int) -> RankNumbers:
        rank = self.node * self.local_size + local_rank
        return RankNumbers(rank, self.size, local_rank, self.local_size)

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


def supervise(order: RankOrder, hang_after: float | None = None) -> Ending:
    """Start all ranks, on this machine alone, and wait for their end."""
    store = local_store()
    return RankSupervisor(order, store, store.port, hang_after).run()


def with_restarts(
    start: Callable[[int], Ending], restarts: int, show: Callable[[str, int], None]
) -> Ending:
    """Start, and start again after what may pass. `show` is told before each further start why, and
    which one it is, from 1.
    """
    number = 0
    while True:
        ending = start(number)
        if not ending.may_restart or number == restarts:
            break
        number += 1
        show(ending.message or "", number)
    if number and ending.message is not None and ending.may_restart:
        again = "once" if number == 1 else f"{number} times"
        return ending._replace(message=f"{ending.message}; it was started again {again}")
    return ending


class RankSupervisor:
    """Of one start. `store` is where the ranks meet; None: another machine watches them."""

    def __init__(
        self, order: RankOrder, store: Any | None, port: int, hang_after: float | None
    ) -> None:
        self._order, self._port = order, port
        self._store = None if store is None else of_start(store, order.restarts)
        self._watch = HangWatch(order.size, hang_after)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._ends: dict[int, RankEnd] = {}
        self._look_at = time.monotonic() + LOOK_S
        self._interrupted_at: float | None = None
        self._first_ended_at = 0.0  # rank 0

    def run(self) -> Ending:
        """Until all have ended."""
        with interruption() as interrupted:
            try:
                self._start()
                return self._wait(interrupted)
            except KeyboardInterrupt:
                self._end(patience_s=0.0)
                return Ending(INTERRUPTED_EXIT_CODE, "interrupted")
            finally:
                self._end(STOP_S)
                for rank in self._processes:
                    self._error_file(rank).unlink(missing_ok=True)

    def _end(self, patience_s: float) -> None:
        end_children(list(self._processes.values()), patience_s)

    def _start(self) -> None:
        order = self._order
        try:
            order.logs.mkdir(parents=True, exist_ok=True)
            for local_rank in range(order.local_size):
                numbers = order.numbers(local_rank)
                self._error_file(numbers.rank).unlink(missing_ok=True)
                with order.log(numbers.rank).open("ab") as log:
                    header = start_line(numbers.rank, numbers.size, order.restarts + 1)
                    log.write(header.encode())
                    log.flush()
                    output = log if numbers.rank else None
                    self._processes[numbers.rank] = start_child(
                        order.words, self._environment(numbers), output
                    )
        except OSError as error:
            raise OutputError(f"cannot write {order.logs}: {error.strerror}") from error

    def _environment(self, numbers: RankNumbers) -> dict[str, str]:
        order = self._order
        environment = child_environment()
        environment.setdefault("OMP_NUM_THREADS", str(order.num_threads))
        if order.is_local and (name := loopback()) is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
        own = {
            PARENT: str(os.getpid()),
            LOG: str(order.log(numbers.rank).resolve()),
            ERROR_FILE: str(self._error_file(numbers.rank).resolve()),
        }
        as_torchrun = rank_environment(
            numbers, order.address, self._port, order.restarts, order.max_restarts
        )
        return environment | as_torchrun | own

    def _error_file(self, rank: int) -> Path:
        return self._order.logs / f".rank-{rank}.json"

    def _wait(self, interrupted: threading.Event) -> Ending:
        while True:
            self._note_ends()
            if any(end.code not in WELL for end in self._ends.values()):
                return self._judge()
            if len(self._ends) == len(self._processes):
                return self._well()
            if interrupted.is_set() and self._is_left():
                return self._well()
            hang = self._hang()
            if hang is not None:
                return self._end_hung(hang)
            time.sleep(POLL_S)

    def _note_ends(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and rank not in self._ends:
                log = self._order.log(rank) if rank else None
                error = read_error(self._error_file(rank))
                self._ends[rank] = RankEnd(rank, code, time.time(), error, log)

    def _well(self) -> Ending:
        """None has failed."""
        if self._interrupted_at is None and all(end.code == 0 for end in self._ends.values()):
            return Ending(0)
        first = self._ends.get(0)  # it has shown how far it came, or did not come so far
        message = None if first is None or first.error is None else first.error.message
        return Ending(INTERRUPTED_EXIT_CODE, message)

    def _judge(self) -> Ending:
        """After a moment in which others end by themselves: one of them may be the cause."""
        began = time.monotonic()
        while len(self._ends) < len(self._processes):
            codes = {end.code for end in self._ends.values() if end.code not in WELL}
            patience_s = ALIKE_S if codes <= OWN_CODES - PASSING_CODES else SETTLE_S
            if time.monotonic() - began > patience_s:
                break
            time.sleep(POLL_S)
            self._note_ends()
        ending = judged([end for end in self._ends.values() if end.code not in WELL])
        return ending._replace(may_restart=ending.may_restart and self._interrupted_at is None)

    def _is_left(self) -> bool:
        """After a Ctrl-C, which is passed on: whether what is left has nothing more to do."""
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            if self._store is not None and not read_beats(self._store, 1):
                raise KeyboardInterrupt  # before anything has begun
            for process in self._processes.values():
                process.send_signal(signal.SIGINT)
        if 0 not in self._ends:
            self._first_ended_at = time.monotonic()
            return False
        return time.monotonic() - self._first_ended_at > LEAVE_S

    def _hang(self) -> Hang | None:
        if self._store is None or time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_S
        return self._watch.look(read_beats(self._store, self._order.size), self._ends.keys())

    def _end_hung(self, hang: Hang) -> Ending:
        """When the ranks that it hangs on have shown where they stand."""
        own = [rank for rank in hang.ranks if rank in self._processes and rank not in self._ends]
        for rank in own:
            self._processes[rank].send_signal(signal.SIGUSR1)
        message = hang.message
        if own:
            time.sleep(DUMP_S)
            message += f" (its stack: {self._order.log(own[0])})"
        may_restart = self._interrupted_at is None
        return Ending(HardwareError.exit_code, message, may_restart)
