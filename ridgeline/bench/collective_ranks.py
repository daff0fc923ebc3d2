"""One rank of `bench collectives`: joins the others, times every collective at every size, and the
first rank prints what all of them took. Started by collectives.py, or by torchrun through it.

    python -m ridgeline.bench.collective_ranks '{"sizes": [1024], "device": "cpu", …}'

A message is as long as hardware/collectives.py counts it: what is gathered, what is reduced, what a
rank has to give away. A time is the slowest rank's, the median over repeats.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import distributed

from ridgeline.hardware.collectives import CollectiveName
from ridgeline.parallel.starting.child import end_with_parent
from ridgeline.parallel.starting.meeting import RankProcess, torchrun_process

dist: Any = distributed  # whose stubs name only half of what it has
WARM_UP, LEAST, MOST, ENOUGH_S = 2, 3, 20, 0.2
Call = Callable[[], Any]


def measure_rank(process: RankProcess, order: dict[str, Any]) -> dict[str, Any]:
    """`curves`: by name, (bytes, seconds); `absent`: why one is not there."""
    device = torch.device(order["device"])
    if device.type == "cuda":
        device = torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=process.store, rank=process.rank, world_size=process.size
    )
    try:
        curves: dict[str, list[tuple[int, float]]] = {}
        absent: dict[str, str] = {}
        for name in order["names"]:
            try:
                curves[name] = [
                    (size, _timed(call_of(name, size, process, device), device))
                    for size in order["sizes"]
                ]
            except (RuntimeError, NotImplementedError, ValueError) as error:
                absent[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return {"curves": curves, "absent": absent, "size": process.size}
    finally:
        dist.destroy_process_group()


def call_of(name: CollectiveName, size: int, process: RankProcess, device: torch.device) -> Call:
    """Of so many bytes, rounded to what ranks can share."""
    world = process.size
    count = max(1, size // 4 // world) * world
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // world, device=device)
    if name == "all-reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if name == "all-to-all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    assert name == "send", name
    return lambda: _sent(whole, process.rank)


def _sent(whole: torch.Tensor, rank: int) -> None:
    """From the first rank to the second, and a byte back, which says that it came."""
    answer = whole[:1]
    if rank == 0:
        dist.send(whole, 1)
        dist.recv(answer, 1)
    elif rank == 1:
        dist.recv(whole, 0)
        dist.send(answer, 0)


def _timed(call: Call, device: torch.device) -> float:
    for _ in range(WARM_UP):
        call()
    times: list[float] = []
    while len(times) < MOST and (len(times) < LEAST or sum(times) < ENOUGH_S):
        times.append(_once(call, device))
    return median(times)


def _once(call: Call, device: torch.device) -> float:
    """Of the slowest rank; all begin together, and all see the same time."""
    dist.barrier()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    taken = torch.tensor([time.perf_counter() - begin], device=device, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    end_with_parent()
    process = torchrun_process()
    assert process is not None, "started as a rank"
    result = measure_rank(process, json.loads(sys.argv[1]))
    if process.rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
