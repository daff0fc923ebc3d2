"""From a process that torchrun (or `ridgeline train --devices`) has started to a rank of a run.

with joined_run(config.layout, device, pulse) as mesh:
    train(config, out, device=device, mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ridgeline.hardware import detect
from ridgeline.hardware.freed_memory import keep_freed_memory
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh, alone, join_mesh, leave_mesh
from ridgeline.parallel.pulse import Pulse
from ridgeline.parallel.starting.meeting import torchrun_process
from ridgeline.training.ranks.likeness import check_layout


@contextmanager
def joined_run(layout: Layout, device: str, pulse: Pulse) -> Iterator[Mesh]:
    """The mesh that this process is part of, until the run ends. The device is this rank's own."""
    process = torchrun_process()
    own = torch.device(detect(device).device if process is None else device)
    if own.type == "cpu":
        keep_freed_memory()
    if process is None:
        yield alone(own)
        return
    if own.type == "cuda":
        torch.cuda.set_device(own)
    pulse.doing("joining the other ranks")
    check_layout(layout, process.store, process.rank)
    try:
        yield join_mesh(layout, process.store, process.rank, process.size, own, pulse=pulse)
    finally:
        leave_mesh()
