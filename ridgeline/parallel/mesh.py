"""The ranks of a layout, joined: a torch.distributed group for each of its axes.

    mesh = join_mesh(layout, store, rank, size, device)     # on every rank
    mesh.axis("tensor").all_reduce(x)                       # in place
    mesh.place.pipeline, mesh.is_first
    leave_mesh()

A group is made when an axis has more than one rank. What is done over a group of one costs nothing,
so that the same code runs on a single device. Collectives with gradients are in collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from ridgeline.errors import HardwareError
from ridgeline.parallel.layout import AxisName, Joined, Layout
from ridgeline.parallel.pulse import Pulse, Waiting

dist: Any = distributed  # whose stubs name only half of what it has

# Besides the layout's own: ranks with copies of the same KV heads; the first and the last stage of
# a model whose head is its embedding; ranks with the same experts; those that reduce gradients
# beside `shard`.
GroupName = AxisName | Joined | Literal["kv", "tied", "expert_copies", "outer"]
STEP_S = 1800.0  # for one collective, in which others may still compile or load

# By their names from torch 2.13 on; the older ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Axis:
    """The ranks that this one does something with, itself among them."""

    def __init__(
        self,
        name: GroupName,
        ranks: Sequence[int],
        rank: int,
        group: Any,
        pulse: Pulse | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self.group = group  # None: alone
        self._pulse = pulse or Pulse()
        self._waiting: dict[str, Waiting] = {}

    def waiting(self, what: str) -> Waiting:
        """For a `with`: while this rank waits for the others of the axis."""
        if what not in self._waiting:
            some = ", ".join(map(str, self.ranks[:8])) + (" …" if self.size > 8 else "")
            self._waiting[what] = self._pulse.waiting(f"{what} over {self.name} with ranks {some}")
        return self._waiting[what]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def all_reduce(self, x: Tensor, reduction: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """In place."""
        if self.size > 1:
            operation = {
                "sum": dist.ReduceOp.SUM,
                "max": dist.ReduceOp.MAX,
                "min": dist.ReduceOp.MIN,
            }
            with self.waiting("all_reduce"):
                dist.all_reduce(x, op=operation[reduction], group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's rows, one rank's behind the other's."""
        if self.size == 1:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.waiting("all_gather"):
            _all_gather(out, x.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over all ranks of this rank's share of the rows."""
        if self.size == 1:
            return x
        assert x.shape[0] % self.size == 0, (x.shape, self.size)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        with self.waiting("reduce_scatter"):
            _reduce_scatter(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The first `sent[0]` rows go to the first rank, and so on; rows from the first come
        first.
        """
        if self.size == 1:
            return x
        out = x.new_empty((sum(received), *x.shape[1:]))
        with self.waiting("all_to_all"):
            dist.all_to_all_single(
                out, x.contiguous(), list(received), list(sent), group=self.group
            )
        return out

    def broadcast(self, x: Tensor, index: int = 0) -> Tensor:
        """The values of one of the ranks, in place."""
        if self.size > 1:
            with self.waiting("broadcast"):
                dist.broadcast(x, src=self.ranks[index], group=self.group)
        return x


@dataclass
class Mesh:
    layout: Layout
    rank: int
    device: torch.device
    axes: dict[GroupName, Axis] = field(default_factory=dict)
    control: Axis | None = None  # all ranks, between their hosts
    weights: Any = None  # as torch's DeviceMesh, once `fully_shard` has asked for it

    def __post_init__(self) -> None:
        self.place = self.layout.coordinates(self.rank)

    @property
    def is_first(self) -> bool:
        """The rank that speaks for all: it writes what is written once."""
        return self.rank == 0

    def axis(self, name: GroupName) -> Axis:
        if name not in self.axes:
            self.axes[name] = Axis(name, (self.rank,), self.rank, None)
        return self.axes[name]

    def join_kv_copies(self, num_kv_heads: int) -> None:
        """Make the groups of ranks that have copies of the same KV heads of a model. Every rank
        calls it.
        """
        layout = self.layout
        if layout.tensor <= num_kv_heads or "kv" in self.axes:
            return
        copies = layout.tensor // num_kv_heads
        ranks = layout.group(self.rank, "tensor")
        first = self.place.tensor // copies * copies
        own = ranks[first : first + copies]
        self.axes["kv"] = Axis("kv", own, self.rank, _made(own, layout.size, None))

    def agreed(self, number: int, reduction: Literal["sum", "max", "min"] = "max") -> int:
        """One number of all ranks', over their hosts: no device waits."""
        if self.control is None:
            return number
        held = torch.tensor([number], dtype=torch.int64)
        return int(self.control.all_reduce(held, reduction))


def alone(device: torch.device | str = "cpu") -> Mesh:
    """One rank."""
    return Mesh(Layout(), 0, torch.device(device))


def join_mesh(
    layout: Layout,
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    backend: str | None = None,
    pulse: Pulse | None = None,
) -> Mesh:
    """Every rank calls it. `pulse` is told what this rank waits for."""
    pulse = pulse or Pulse()
    assert layout.size == size, "check_world comes first"
    backend = backend or ("gloo" if device.type == "cpu" else "nccl")
    if backend == "nccl" and not dist.is_nccl_available():
        raise HardwareError(
            "this build of torch has no NCCL (RCCL on AMD), through which ranks on GPUs send; "
            "install torch for CUDA or ROCm, or give --device cpu"
        )
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=STEP_S)
        )
        mesh = Mesh(layout, rank, device)
        for name, ranks in own_groups(layout, rank).items():
            group = _made(ranks, size, None)
            if len(ranks) > 1:
                mesh.axes[name] = Axis(name, ranks, rank, group, pulse)
        if size > 1:
            control = "fake" if backend == "fake" else "gloo"
            group = _made(range(size), size, control)
            mesh.control = Axis("all", range(size), rank, group, pulse)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise HardwareError(f"rank {rank} of {size} could not join the others: {reason}") from error
    return mesh


def leave_mesh() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_groups(layout: Layout, rank: int) -> dict[GroupName, tuple[int, ...]]:
    """The groups of a rank. The same names in the same order on every rank: torch counts a rank's
    groups to name the next one.
    """
    names: tuple[AxisName | Joined, ...] = (
        "tensor", "context", "shard", "replicate", "pipeline", "data", "gradient", "all",
    )  # fmt: skip
    groups: dict[GroupName, tuple[int, ...]] = {name: layout.group(rank, name) for name in names}
    own = layout.coordinates(rank)
    groups["outer"] = tuple(
        layout.rank_of(own._replace(replicate=replicate, context=context))
        for replicate in range(layout.replicate)
        for context in range(layout.context)
    )
    if layout.expert > 1:
        groups["expert"] = layout.group(rank, "expert")
        groups["expert_copies"] = layout.expert_copies(rank)
    groups = {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    if layout.pipeline > 1:
        line = layout.group(rank, "pipeline")
        is_end = rank in (line[0], line[-1])
        groups["tied"] = (line[0], line[-1]) if is_end else (rank,)
    return groups


def _made(ranks: Sequence[int], size: int, backend: str | None) -> Any:
    """Only the ranks of a group take part in making it: a layout of thousands has thousands."""
    if backend is None and len(ranks) == size:
        return dist.group.WORLD
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
