"""Every collective that runs, with its size and over which ranks: ours, and those of torch itself.

with CollectiveRecorder(mesh) as recorder:
    trainer.step(batches, lr)
for each in recorder.totals(): print(each.kind, each.over, each.num_ranks, each.num_bytes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.parallel.mesh import Mesh

dist: Any = distributed
KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}

Key = tuple[str, str, int]  # kind, over, number of ranks


@dataclass(frozen=True)
class Collective:
    """All of one kind over one group."""

    kind: str
    over: str  # the name of the group
    num_ranks: int
    count: int
    num_bytes: int  # of the whole message: what goes in, or comes out where that is more

    @property
    def key(self) -> Key:
        return self.kind, self.over, self.num_ranks

    @property
    def sent_bytes(self) -> float:
        """By each rank, as rings do it."""
        share = (self.num_ranks - 1) / self.num_ranks
        factor = {"all-reduce": 2.0 * share, "send": 1.0, "receive": 0.0, "broadcast": 1.0}
        return self.num_bytes * factor.get(self.kind, share)


class CollectiveRecorder(TorchDispatchMode):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        for name, each in tuple(mesh.axes.items()):
            if each.group is not None:  # one group may be that of several names: the axis is first
                self._names.setdefault(each.group.group_name, axis_words(name, mesh))
        self._counts: Counter[Key] = Counter()
        self._bytes: Counter[Key] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            self._record(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Sequence[Any]) -> Key | None:
        if name not in KINDS:
            return None
        tensors: list[int] = []
        group = None
        for each in args:
            if isinstance(each, Tensor):
                tensors.append(each.nbytes)
            elif isinstance(each, list) and each and isinstance(each[0], Tensor | list):
                tensors.append(_bytes_of(each))
            elif isinstance(each, torch.ScriptObject) and group is None:
                group = dist.ProcessGroup.unbox(each)
        assert group is not None, name
        key = KINDS[name], str(self._names.get(group.group_name, "all")), group.size()
        if key[2] > 1:
            self._counts[key] += 1
            self._bytes[key] += max(tensors)
        return key

    def totals(self) -> list[Collective]:
        """The largest first."""
        totals = [Collective(*key, count, self._bytes[key]) for key, count in self._counts.items()]
        return sorted(totals, key=lambda each: -each.sent_bytes)


def axis_words(name: str, mesh: Mesh) -> str:
    """Ranks with copies of the same weights are those of one axis or of two."""
    if name != "outer":
        return name
    axes = [axis for axis in ("replicate", "context") if mesh.axis(axis).size > 1]
    return " × ".join(axes)


def _bytes_of(tensors: Sequence[Any]) -> int:
    return sum(_bytes_of(each) if isinstance(each, list) else each.nbytes for each in tensors)
