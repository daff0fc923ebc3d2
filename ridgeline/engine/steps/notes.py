"""Which ops a forward pass launches, in their order: what a trace of a replayed graph is held
against, where kernels come without the code that launched them.

    with noting(model) as notes:
        model(ids_T, PagedSequences(…, notes=notes))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.models.transformer import ResidualStream


class Note(NamedTuple):
    op: str  # a module by its name in the model, or a kernel's op
    shape: tuple[int, ...]  # of its first input
    dtype: torch.dtype | None = None  # of it, where that is not the model's


END = Note("", ())  # what follows belongs to no op


def first_of(argument: Tensor | ResidualStream | tuple[Tensor, ...]) -> Tensor:
    """What a module is called with: numbers, codes with scales, or a stream."""
    if isinstance(argument, ResidualStream):
        return argument.x_TD
    return argument if isinstance(argument, Tensor) else argument[0]


@contextmanager
def noting(model: nn.Module) -> Iterator[list[Note]]:
    """The model's innermost modules as they are called; ops between them are for whoever calls
    them to add.
    """
    notes: list[Note] = []

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            notes.append(Note(name, tuple(first_of(args[0]).shape)))

        return note

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()
