"""How many ranks a run has and what each gets of this machine: settled, or refused, before anything
is started.

    layout = layout_for(None, devices=4)        # shard=4
    check_world(layout, numbers)                # torchrun has started as many
    check_gpus(4, "cuda", "use --devices {num_gpus}")
    threads_each(4)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import detect
from ridgeline.hardware.detection import num_cores
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.starting.place import RankNumbers


def layout_for(layout: Layout | None, devices: int | None, flag: str = "--devices") -> Layout:
    """The layout that was given, or the usual one of so many devices. None: not given."""
    if layout is None:
        return Layout(shard=devices or 1)
    if devices is not None and layout.size != devices:
        raise UsageError(
            f"--layout {layout.words()} is one of {layout.size} devices, and {flag} is {devices}; "
            f"give {flag} {layout.size}, or a layout of {devices}, such as "
            f"{of_size(layout, devices).words()}"
        )
    return layout


def of_size(layout: Layout, size: int) -> Layout:
    """One like it over so many devices: with more or fewer to `shard` where that comes out even."""
    others = layout.size // layout.shard
    try:
        if size % others == 0:
            return replace(layout, shard=size // others)
    except UsageError:  # `expert` does not divide the ranks then
        pass
    return Layout(shard=size)


def check_world(layout: Layout, numbers: RankNumbers) -> None:
    """That as many ranks were started as the layout has."""
    if layout.size == numbers.size:
        return
    nodes = numbers.size // numbers.local_size
    each = layout.size // nodes if layout.size % nodes == 0 else None
    start = (
        f"start {layout.size} ranks" if each is None else f"use torchrun --nproc-per-node {each}"
    )
    if layout.is_single:
        start = "start one, without torchrun"
    elif each is not None and nodes > 1:
        start += f" on each of {nodes} nodes"
    raise UsageError(
        f"the layout {layout.words()} is one of {layout.size} ranks, and {numbers.size} were "
        f"started; {start}, or give --layout {of_size(layout, numbers.size).words()}"
    )


def device_type_of_ranks(device: str, num_ranks: int) -> str:
    """cpu or cuda, without a look at a GPU that may be another rank's."""
    if device.startswith("cuda:"):
        raise UsageError(
            f"device is {device}, and each of {num_ranks} ranks takes a GPU of its own; give cuda, "
            "and CUDA_VISIBLE_DEVICES to choose which"
        )
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda"
    return detect(device).device_type


def check_gpus(num_ranks: int, device_type: str, remedy: str) -> None:
    """A GPU for each rank on this machine. `remedy` may name {num_gpus}."""
    num_gpus = num_ranks if device_type == "cpu" else torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise HardwareError(
            f"{num_ranks} ranks on this machine need a GPU each, and there are {num_gpus}; "
            + remedy.format(num_gpus=num_gpus)
        )


def device_of(device_type: str, numbers: RankNumbers) -> str:
    """A rank's own."""
    return "cpu" if device_type == "cpu" else f"cuda:{numbers.local_rank}"


def threads_each(num_ranks: int) -> int:
    """Of this machine's cores, for each of so many ranks."""
    return max(1, num_cores() // num_ranks)
