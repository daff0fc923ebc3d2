"""`bench collectives`: how long ranks take for what they do together, by collective, size and
number of ranks, measured here (gloo between processes of a CPU, NCCL or RCCL between GPUs) and
kept for plans (hardware/collective_curves.py).

    result = measure_collectives("cpu", group_sizes=(2,), sizes=sizes_to(64 << 20))
    result.curves[0].seconds(1 << 20)
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ridgeline.bench.collective_ranks import measure_rank
from ridgeline.errors import HardwareError
from ridgeline.hardware import Hardware
from ridgeline.hardware.collectives import CollectiveCurve, CollectiveName
from ridgeline.parallel.starting.child import (
    child_environment,
    end_children,
    local_store,
    start_child,
)
from ridgeline.parallel.starting.meeting import RankProcess
from ridgeline.parallel.starting.place import RankNumbers, loopback, rank_environment
from ridgeline.progress import Progress
from ridgeline.records import Record, Value

NAMES: tuple[CollectiveName, ...] = get_args(CollectiveName)
SMALLEST = 1 << 10  # bytes
MOST_S = 300.0  # for one group of ranks


@dataclass
class CollectiveResult:
    curves: list[CollectiveCurve] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # "all-to-all of 2": why


def sizes_to(most: int) -> list[int]:
    """Powers of two from 1 KiB on."""
    return [SMALLEST << n for n in range(64) if SMALLEST << n <= most]


def group_sizes_to(most: int) -> list[int]:
    """2, 4, 8, … and all."""
    return sorted({2**n for n in range(1, most.bit_length()) if 2**n <= most} | {most})


def measure_collectives(
    hardware: Hardware,
    group_sizes: Sequence[int],
    sizes: Sequence[int],
    names: Sequence[CollectiveName] = NAMES,
    progress: Progress | None = None,
) -> CollectiveResult:
    """With ranks of this machine, a group after the other."""
    result = CollectiveResult()
    for number, size in enumerate(group_sizes):
        if progress is not None:
            progress("timing collectives", number, len(group_sizes))
        _add(result, measure_group(hardware, size, sizes, names), hardware)
    return result


def measure_under_torchrun(
    hardware: Hardware,
    process: RankProcess,
    sizes: Sequence[int],
    names: Sequence[CollectiveName] = NAMES,
) -> CollectiveResult:
    """As one of the ranks that torchrun has started: of all of them."""
    result = CollectiveResult()
    _add(result, measure_rank(process, _order(hardware, sizes, names)), hardware)
    return result


def _order(hardware: Hardware, sizes: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    kind = "cpu" if hardware.device_type == "cpu" else "cuda"
    return {"sizes": list(sizes), "names": list(names), "device": kind}


def _add(result: CollectiveResult, measured: dict[str, Any], hardware: Hardware) -> None:
    for name, points in measured["curves"].items():
        pairs = tuple((int(size), float(seconds)) for size, seconds in points)
        result.curves.append(CollectiveCurve(name, measured["size"], pairs, hardware.name))
    for name, reason in measured["absent"].items():
        result.absent[f"{name} of {measured['size']}"] = reason


def measure_group(
    hardware: Hardware, size: int, sizes: Sequence[int], names: Sequence[str]
) -> dict[str, Any]:
    """What the first of `size` processes, which are started here, has to say."""
    store = local_store()
    words = ["-m", "ridgeline.bench.collective_ranks",
             json.dumps(_order(hardware, sizes, names))]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ridgeline-collectives-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(size)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                numbers = RankNumbers(rank, size, rank, size)
                with log.open("wb") as output:
                    ranks.append(start_child(words, _environment(numbers, store.port), output))
            for process in ranks:
                process.wait(MOST_S)
        except subprocess.TimeoutExpired:
            raise HardwareError(
                f"{size} ranks took more than {MOST_S:.0f} s for their collectives; give a smaller "
                "--most or fewer --ranks"
            ) from None
        finally:
            end_children(ranks)
        texts = [log.read_text(errors="replace").strip() for log in logs]
        ended = zip(ranks, texts, strict=True)
        failed = next((text for process, text in ended if process.returncode), None)
        if failed is not None:
            raise HardwareError(
                f"a rank failed: {(failed.splitlines() or ['no reason given'])[-1]}"
            )
        result: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
        return result


def _environment(numbers: RankNumbers, port: int) -> dict[str, str]:
    environment = child_environment() | rank_environment(numbers, "127.0.0.1", port, 0, 0)
    environment["OMP_NUM_THREADS"] = "1"
    if (name := loopback()) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
    return environment


def as_record(result: CollectiveResult, hardware: Hardware) -> Record:
    values = {
        f"{curve.name.replace('-', '_')}_{curve.num_ranks}_ranks_{size}": Value(seconds, "s")
        for curve in result.curves
        for size, seconds in curve.points
    }
    return Record.create("bench-collectives", hardware, values)
