"""The ranks of a run: `ridgeline train` starts them itself, or is one of them. Jobs that others
start are launching.py's.

    start = start_ranks(args, layout, out)      # does not return where this process starts others
    start.layout, start.device, start.resume, start.pulse
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ridgeline.errors import (
    HardwareError,
    RidgelineError,
    UsageError,
)
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.pulse import Pulse, start_pulse
from ridgeline.parallel.starting.endings import Ending
from ridgeline.parallel.starting.options import StartOptions
from ridgeline.parallel.starting.order import (
    check_gpus,
    check_world,
    device_of,
    device_type_of_ranks,
    layout_for,
    threads_each,
)
from ridgeline.parallel.starting.place import (
    RankNumbers,
    is_own_child,
    numbers_in,
    restart_count,
)
from ridgeline.parallel.starting.rank import enter_rank
from ridgeline.parallel.starting.supervisor import LOGS, RankOrder, supervise, with_restarts
from ridgeline.training.config_file import FILE_NAME
from ridgeline.training.saving.checkpoint import last_whole

SHOW_CURSOR = "\x1b[?25h"  # which a table that was killed has hidden


class RanksError(HardwareError):
    """A rank has ended all of them. It has that rank's exit code, where that says more."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.exit_code = ending.code


class RankStart(NamedTuple):
    """How this process does its work."""

    layout: Layout
    device: str
    resume: bool
    pulse: Pulse
    numbers: RankNumbers | None  # None: a single device, nobody looks after it


def start_ranks(
    args: argparse.Namespace, options: StartOptions, layout: Layout | None, out: Path
) -> RankStart:
    """This process's part: a rank that was started, or a single device. Where it is to start ranks
    it looks after them until they end, and ends with SystemExit or their error. `layout` is None
    where none was given: then it is the usual one of --devices.
    """
    numbers = numbers_in()
    if numbers is not None:
        return _as_rank(args, options, layout, numbers, out)
    layout = layout_for(layout, options.devices)
    if args.dry_run or (layout.is_single and not options.is_supervised):
        return RankStart(layout, args.device, args.resume, Pulse(), None)
    ending = _supervised(args, options, layout, out)
    if ending.message is None:
        raise SystemExit(ending.code)
    if sys.stdout.isatty():
        print(SHOW_CURSOR, end="", flush=True)
    raise RanksError(ending)


def _as_rank(
    args: argparse.Namespace,
    options: StartOptions,
    layout: Layout | None,
    numbers: RankNumbers,
    out: Path,
) -> RankStart:
    enter_rank()
    is_own, size = is_own_child(), numbers.size
    if not is_own and options.restarts:
        raise UsageError(
            "--restarts is for ranks that are started here; torchrun starts its own again with "
            f"--max-restarts {options.restarts} before the command"
        )
    if not is_own and options.devices not in (None, numbers.local_size):
        raise UsageError(
            f"--devices is {options.devices} and torchrun has started {numbers.local_size} ranks "
            "on this machine; remove --devices"
        )
    layout = layout_for(layout, options.devices if is_own else None)
    check_world(layout, numbers)
    device = args.device
    if size > 1:
        device_type = device_type_of_ranks(device, size)
        check_gpus(numbers.local_size, device_type, "start as many as there are")
        device = device_of(device_type, numbers)
    goes_on = restart_count() > 0 and (out / FILE_NAME).is_file()  # torchrun adds no --resume
    resume = args.resume or (goes_on and not is_own)
    return RankStart(layout, device, resume, start_pulse(options.hang_after), numbers)


def _supervised(
    args: argparse.Namespace, options: StartOptions, layout: Layout, out: Path
) -> Ending:
    size = layout.size
    if size > 1:
        device_type = device_type_of_ranks(args.device, size)
        check_gpus(size, device_type, "use --devices {num_gpus}, or a machine with more")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder")
    was_there, had_logs = out.is_dir(), (out / LOGS).is_dir()

    def start(number: int) -> Ending:
        words = ["-m", "ridgeline", *args.words]
        if number and "--resume" not in words and (out / FILE_NAME).is_file():
            words.append("--resume")
        order = RankOrder(
            words, size, size, out / LOGS, threads_each(size), restarts=number,
            max_restarts=options.restarts,
        )  # fmt: skip
        return supervise(order, options.hang_after)

    def show(why: str, number: int) -> None:
        line = f"ridgeline: {why}; {_next_start(out)} (restart {number} of {options.restarts})"
        print(line, file=sys.stderr, flush=True)

    ending = with_restarts(start, options.restarts, show)
    is_refused = ending.code and not ending.may_restart and not (out / FILE_NAME).is_file()
    if is_refused and not had_logs and str(out / LOGS) not in (ending.message or ""):
        shutil.rmtree(out / LOGS, ignore_errors=True)  # nothing is left of it
        if not was_there:
            with suppress(OSError):
                out.rmdir()
    return ending


def _next_start(out: Path) -> str:
    with suppress(RidgelineError):
        checkpoint = last_whole(out).checkpoint
        if checkpoint is not None:
            return f"going on from {checkpoint.name}"
    return "beginning again"
