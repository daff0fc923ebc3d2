"""What tests start as ranks: steps that sum one number over all, and a checkpoint after each second
one. On demand one of them dies, hangs, or finds something wrong with its input.

    python tests/rank_program.py RUN 2 '{"steps": 6, "die": {"1": 3}}'    # starts two

With `resume` or `--resume` it goes on from the checkpoint. Rank 0 prints steps and sum at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ridgeline.errors import HardwareError, NumericsError, RidgelineError, UsageError
from ridgeline.parallel.pulse import Pulse, start_pulse
from ridgeline.parallel.starting.interruption import interruption
from ridgeline.parallel.starting.meeting import torchrun_process
from ridgeline.parallel.starting.order import threads_each
from ridgeline.parallel.starting.place import numbers_in, restart_count
from ridgeline.parallel.starting.rank import enter_rank
from ridgeline.parallel.starting.supervisor import RankOrder, supervise, with_restarts
from ridgeline.parallel.starting.telling import show_error

dist: Any = distributed
ERRORS = {"input": UsageError, "device": HardwareError, "numbers": NumericsError}


def start(run: Path, size: int, plan: dict[str, Any]) -> int:
    words = [__file__, str(run), str(size), json.dumps(plan)]

    def once(restarts: int) -> Any:
        resumed = [*words, "resume"] if (run / "checkpoint.json").is_file() else words
        threads = threads_each(size)
        order = RankOrder(resumed, size, size, run / "logs", threads, restarts=restarts)
        return supervise(order, plan.get("hang_after"))

    def show(why: str, number: int) -> None:
        print(f"again {number}: {why}", file=sys.stderr)

    ending = with_restarts(once, plan.get("restarts", 0), show)
    if ending.message is not None:
        print(f"ridgeline: error: {ending.message}", file=sys.stderr)
    return int(ending.code)


def work(run: Path, plan: dict[str, Any], resume: bool) -> int:
    numbers = enter_rank()
    assert numbers is not None
    rank, first = str(numbers.rank), restart_count() == 0
    hang_after = plan.get("hang_after")
    pulse = start_pulse(hang_after)
    if rank in plan.get("refuse", {}):
        kind, message = plan["refuse"][rank]
        raise ERRORS[kind](message)
    process = torchrun_process()
    if process is not None:
        patience = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=process.store, rank=process.rank, world_size=process.size,
            timeout=patience,
        )  # fmt: skip
    step, total = 0, 0
    if resume and (run / "checkpoint.json").is_file():
        step, total = json.loads((run / "checkpoint.json").read_text())
    with interruption() as stop:
        while step < plan["steps"]:
            if first and plan.get("die", {}).get(rank) == step + 1:
                end_somehow(plan.get("how", "kill"))
            if first and plan.get("hang", {}).get(rank) == step + 1:
                hang_here(plan.get("how", "sleep"))
            total += summed(step + 1, numbers.size, pulse)
            step += 1
            pulse.step(step)
            (run / f"at-{rank}").write_text(str(step))
            if numbers.rank == 0 and step % 2 == 0:
                write(run / "checkpoint.json", [step, total])
            if summed(int(stop.is_set()), numbers.size, pulse):
                break
            time.sleep(plan.get("pause", 0.0))
    if numbers.rank == 0:
        write(run / "checkpoint.json", [step, total])
        print(json.dumps([step, total]))
    return 130 if step < plan["steps"] else 0


def summed(number: int, size: int, pulse: Pulse) -> int:
    if size == 1:
        return number
    value = torch.tensor([number])
    with pulse.waiting(f"all_reduce with ranks {', '.join(map(str, range(size)))}"):
        dist.all_reduce(value)
    return int(value)


def write(path: Path, values: list[int]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(values))
    path.with_suffix(".tmp").replace(path)


def end_somehow(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the device fell off the bus")
    if how == "exit":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_here(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def main() -> int:
    run, size, plan = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    if numbers_in() is None:
        return start(run, size, plan)
    torch.set_num_threads(1)
    try:
        return work(run, plan, sys.argv[-1].endswith("resume"))
    except RidgelineError as error:
        show_error(str(error))
        return error.exit_code
    except RuntimeError as error:
        show_error(f"internal error: {error}")
        return 70
    except KeyboardInterrupt:
        show_error("interrupted")
        return 130


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's groups may wait for ranks that have gone
