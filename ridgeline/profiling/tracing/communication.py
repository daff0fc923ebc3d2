"""What ranks of tensor parallel say to each other in a step, as ops of their own: a link that tells
whoever traces when a sum or a gather begins and ends, and the bytes that cross it.

An op's time is this rank's: it includes waiting for the slowest of the others.

    group.data = NotedLink(group.data, scopes.notes)
    link_bytes("all_reduce", x.nbytes, num_ranks=2)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ridgeline.engine.steps.notes import END, Note
from ridgeline.parallel.inference.group import Link, Reduction


class NotedLink:
    """Another link, with notes of what goes over it."""

    def __init__(self, link: Link, notes: list[Note]) -> None:
        self.link, self.notes = link, notes
        self.rank, self.size = link.rank, link.size

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        with self._noted("all_reduce", tensor):
            self.link.all_reduce(tensor, reduction)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        with self._noted("all_gather", tensor):
            return self.link.all_gather(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        with self._noted("broadcast", tensor):
            self.link.broadcast(tensor)

    def check(self) -> None:
        self.link.check()

    def close(self) -> None:
        self.link.close()

    @contextmanager
    def _noted(self, op: str, x: Tensor) -> Iterator[None]:
        self.notes.append(Note(op, tuple(x.shape), x.dtype))
        try:
            yield
        finally:
            self.notes.append(END)


def link_bytes(op: str, num_bytes: float, num_ranks: int) -> float:
    """That each rank must send at least, of a tensor of so many bytes on each: around a ring, a sum
    goes twice, less the part that every rank has already.
    """
    if num_ranks == 1:
        return 0.0
    if op == "all_reduce":
        return 2.0 * (num_ranks - 1) / num_ranks * num_bytes
    return (num_ranks - 1) * num_bytes if op == "all_gather" else num_bytes
