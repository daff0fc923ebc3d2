"""From a process that torchrun (or `ridgeline train --devices`) has started to a rank of a run.

with joined_run(config.layout, device, torchrun_process()) as mesh:
    train(config, out, device=str(mesh.device), mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import detect
from ridgeline.parallel.launch import RankProcess
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh, alone, check_size, join_mesh, leave_mesh


def rank_device(device: str, process: RankProcess) -> str:
    """A GPU of its own for each rank of a machine."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"--device {device} names one GPU, and there are {process.size} ranks; give cuda, and "
            "CUDA_VISIBLE_DEVICES to choose which"
        )
    count = torch.cuda.device_count()
    if process.local_size > count:
        raise HardwareError(
            f"{process.local_size} ranks on this machine need a GPU each, and there are {count}; "
            f"start {count}"
        )
    return f"cuda:{process.local_rank}"


@contextmanager
def joined_run(layout: Layout, device: str, process: RankProcess | None) -> Iterator[Mesh]:
    """The mesh that this process is part of, until the run ends."""
    if process is None:
        check_size(layout, 1)
        yield alone(detect(device).device)
        return
    check_size(layout, process.size)
    own = torch.device(rank_device(device, process))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    mesh = join_mesh(layout, process.store, process.rank, process.size, own)
    try:
        yield mesh
    finally:
        leave_mesh()
