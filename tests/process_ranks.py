"""Ranks for tests: processes on this machine, one thread each, joined by gloo.

    run_ranks(layout, work, *values)        # work(mesh, *values) on every rank; all results

They are forked from a server that has imported what they need, so that each takes a fraction of a
second.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import join_mesh, leave_mesh

LIMIT_S = 600.0  # until a rank is taken to hang, on a machine however busy
processes: Any = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "torch",
        "ridgeline.training.naive",
        "ridgeline.training.ranks.weights.sources",
        "ridgeline.training.saving.rank_saver",
        "process_ranks",
    ]
)


def run_ranks(layout: Layout, work: Callable[..., Any], *values: Any) -> list[Any]:
    """What `work` returns on each rank. It and the values are pickled: a function of a module."""
    with TemporaryDirectory() as folder:
        connections, started = [], []
        for rank in range(layout.size):
            ours, theirs = processes.Pipe()
            value = pickle.dumps((layout, rank, folder, work, values))
            process = processes.Process(target=_rank, args=(theirs, value), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            started.append(process)
        try:
            return _results(connections)
        finally:
            for process in started:
                process.kill()
                process.join()


def _results(connections: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [each for i, each in enumerate(connections) if i not in results]
        ready = wait(waiting, LIMIT_S)
        assert ready, f"ranks {sorted(set(range(len(connections))) - set(results))} hang"
        for connection in ready:
            rank = connections.index(connection)  # type: ignore[arg-type]
            try:
                error, results[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert error is None, f"rank {rank}: {error}"
    return [results[rank] for rank in range(len(connections))]


def _rank(connection: Connection, value: bytes) -> None:
    torch.set_num_threads(1)
    layout, rank, folder, work, values = pickle.loads(value)
    error, result = None, None
    try:
        store = distributed.FileStore(str(Path(folder) / "store"), layout.size)
        mesh = join_mesh(layout, store, rank, layout.size, torch.device("cpu"))
        result = work(mesh, *values)
    except BaseException:
        error = traceback.format_exc()
    connection.send_bytes(pickle.dumps((error, result)))  # not by torch's way, which shares memory
    leave_mesh()
