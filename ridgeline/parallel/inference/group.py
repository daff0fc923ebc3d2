"""A group of ranks that work on one model, and what they tell each other.

Two links join them. Over `data` go the tensors of the forward pass, from where the model lies;
over `control` go numbers and words between the hosts, so that nobody waits for a device to hear of
the next step. Who carries them is the links' matter (links.py: processes; tests: threads).

Where the layers are cut in stages, `data` joins the ranks of a stage, who share its matrices, and
`control` all of them; over `ring` each rank hands the hidden states on to the one at its place in
the next stage, and the last stage to the first (stages.py).

    group.all_reduce(x_TD)                  # in place: the sum over all ranks, the same on each
    if group.rank == 0: group.send([1, 2, 3])
    else: words = group.receive()
    model = group.together(load)            # if it fails on one rank, it fails on all
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ridgeline.errors import HardwareError

Reduction = Literal["sum", "max", "min"]
Result = TypeVar("Result")
HEAD_WORDS = 1024  # 64-bit words of a message that go in one piece; what is longer goes in two
TEXT_BYTES = 400  # of a reason that one rank tells the others


class Link(Protocol):
    """One way between the ranks. Every call is made by all of them, in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        """In place."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, on every rank."""

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values, in place."""

    def check(self) -> None:
        """HardwareError if a rank is known to have gone."""

    def close(self) -> None:
        """No call follows."""


class Ring(Protocol):
    """From stage to stage; `rank` is the stage, and `size` how many there are."""

    rank: int
    size: int

    def send(self, tensor: Tensor, rank: int) -> None:
        """To one that receives it."""

    def receive(self, tensor: Tensor, rank: int) -> None:
        """In place, what another sends."""

    def close(self) -> None:
        """No call follows."""


class Group:
    """`rank` of `size` share the matrices of `stage` of `num_stages`."""

    def __init__(self, data: Link, control: Link, ring: Ring | None = None) -> None:
        self.rank, self.size = data.rank, data.size
        self.data, self.control, self.ring = data, control, ring
        self.stage, self.num_stages = (0, 1) if ring is None else (ring.rank, ring.size)
        # Of those that carry tensors of a pass, since whoever counts set it to 0.
        self.num_calls = 0
        self.in_order = False  # sums in the order of the ranks, whatever the shape

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself, now the sum over all ranks."""
        if self.in_order:
            self._add_in_order(x)
        else:
            self.data.all_reduce(x)
        self._count(x)
        return x

    def _add_in_order(self, x: Tensor) -> None:
        """Libraries cut a sum over ranks in pieces by its size, and begin each with another rank:
        with more than two, an element's last bit follows from how many there are beside it. Here
        each rank has all parts and adds them in fp32, element by element.
        """
        first, *others = self.data.all_gather(x)
        total = first.float()
        for part in others:
            total = total + part.float()
        x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        parts = self.data.all_gather(x)
        self._count(x)
        return parts

    def broadcast(self, x: Tensor) -> None:
        self.data.broadcast(x)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.control.rank == 0

    def hand_on(self, x: Tensor) -> None:
        """To the next stage; from the last to the first."""
        assert self.ring is not None, "one stage has no next one"
        self.ring.send(x.contiguous(), (self.stage + 1) % self.num_stages)
        self._count(x)

    def take_over(self, x: Tensor) -> Tensor:
        """`x` itself, now what the stage before hands on."""
        assert self.ring is not None, "one stage has none before it"
        self.ring.receive(x, (self.stage - 1) % self.num_stages)
        self._count(x)
        return x

    def _count(self, x: Tensor) -> None:
        """What was made, and not only captured into a graph: that does not run now."""
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.num_calls += 1

    def send(self, words: Sequence[int]) -> None:
        """Rank 0: numbers for all others, who `receive` them."""
        message = torch.frombuffer(array("q", [len(words), *words]), dtype=torch.int64)
        head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
        head[: min(len(message), HEAD_WORDS)] = message[:HEAD_WORDS]
        self.control.broadcast(head)
        if len(message) > HEAD_WORDS:
            self.control.broadcast(message[HEAD_WORDS:].clone())

    def receive(self) -> list[int]:
        head = torch.zeros(HEAD_WORDS, dtype=torch.int64)
        self.control.broadcast(head)
        count = int(head[0])
        words = head[1 : 1 + count].tolist()
        if len(words) < count:
            rest = torch.zeros(count - len(words), dtype=torch.int64)
            self.control.broadcast(rest)
            words += rest.tolist()
        return words

    def largest(self, number: int) -> int:
        """Of all ranks' numbers."""
        return self._reduced(number, "max")

    def smallest(self, number: int) -> int:
        return self._reduced(number, "min")

    def _reduced(self, number: int, reduction: Reduction) -> int:
        held = torch.tensor([number], dtype=torch.int64)
        self.control.all_reduce(held, reduction)
        return int(held)

    def texts(self, text: str) -> list[str]:
        """Every rank's text, cut where it is too long."""
        raw = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        gathered = self.control.all_gather(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return [bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore") for text in gathered]

    def together(self, work: Callable[[], Result]) -> Result:
        """Do something on every rank. Where one fails, all of them raise: what they raise says why,
        and nobody waits for a rank that has given up.
        """
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        if self.largest(error is not None):
            reasons = self.texts("" if error is None else str(error) or type(error).__name__)
            if error is not None:
                raise error
            rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
            raise HardwareError(f"rank {rank} of {self.control.size}: {reason}")
        return result

    def check(self) -> None:
        self.control.check()

    def close(self) -> None:
        for link in (self.data, self.control, self.ring):
            if link is not None:
                link.close()
