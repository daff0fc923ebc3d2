"""Which module or op is at work: scopes that open and close while a step runs, for a clock on a CPU
or a profiler on a GPU to be held against.

A scope is a call of one of the model's modules, or an op that the engine notes between them (see
engine/steps/notes.py), which lasts until the next one or to the end of the module around it. Each
is numbered, so that what is found in it later can be told which call it was and with what shapes.

    scopes = Scopes(model, ClockMarks())
    with scopes.watching():
        runner.notes = scopes.notes
        ...
    scopes.calls[3].name        # "layers.0.attn.qkv"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ridgeline.engine.steps.notes import END, Note, first_of
from ridgeline.models.transformer import ResidualStream

PREFIX = "ridgeline:"  # of scopes in a trace


@dataclass(frozen=True)
class ScopeCall:
    """One scope."""

    index: int
    name: str  # of a module in the model ("" is the model), or of an op
    kind: Literal["module", "op"]
    shape: tuple[int, ...]  # of its first input
    dtype: torch.dtype | None = None
    module: nn.Module | None = None
    norm: Tensor | None = None  # the weight of a norm that a product takes along
    activation: str | None = None
    has_residual: bool = False
    part: Any = None  # of a step (division.py), where whoever made the scope knows it


class Marks(Protocol):
    def begin(self, index: int) -> None: ...

    def end(self) -> None: ...


class ScopeSpan(NamedTuple):
    """A scope on a clock. Seconds; `parent` is the number of the call around it."""

    call: int
    parent: int | None
    begin: float
    end: float


class ClockMarks:
    """Scopes by the host's clock: what a CPU computes is computed between them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spans: list[ScopeSpan] = []
        self._open: list[tuple[int, float]] = []

    def begin(self, index: int) -> None:
        self._open.append((index, self.clock()))

    def end(self) -> None:
        now = self.clock()
        index, begin = self._open.pop()
        parent = self._open[-1][0] if self._open else None
        self.spans.append(ScopeSpan(index, parent, begin, now))


class TraceMarks:
    """Scopes as ranges in torch.profiler's trace."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def begin(self, index: int) -> None:
        entered = record_function(f"{PREFIX}{index}")
        entered.__enter__()
        self._open.append(entered)

    def end(self) -> None:
        self._open.pop().__exit__(None, None, None)


class _Notes(list[Note]):
    """As the engine fills it, but each note opens a scope."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self._scopes = scopes

    def append(self, note: Note) -> None:
        if note == END:
            self._scopes.end_op()
        else:
            self._scopes.begin_op(*note)


class Scopes:
    def __init__(self, model: nn.Module, marks: Marks) -> None:
        self.model, self.marks = model, marks
        self.calls: list[ScopeCall] = []
        self.first_of_step: list[int] = []  # calls, where whoever steps says so
        self.notes: list[Note] = _Notes(self)
        self._open: list[ScopeCall] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls of all modules open scopes, inside this block."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.enter_context(self._noticed(name, module))
            yield

    def begin_op(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        self.end_op()
        self._begin(ScopeCall(len(self.calls), name, "op", shape, dtype))

    def end_op(self) -> None:
        if self._open and self._open[-1].kind == "op":
            self._end()

    def begin_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.end_op()
        self._begin(_call(len(self.calls), name, module, args, kwargs))

    def end_module(self) -> None:
        self.end_op()
        self._end()

    def _begin(self, call: ScopeCall) -> None:
        self.calls.append(call)
        self._open.append(call)
        self.marks.begin(call.index)

    def _end(self) -> None:
        self._open.pop()
        self.marks.end()

    @contextmanager
    def _noticed(self, name: str, module: nn.Module) -> Iterator[None]:
        """By hooks, or where a module is called without a look for them (host_model.py), by a class
        that differs in its call alone.
        """
        kind: Any = type(module)
        if kind.__call__ is nn.Module.__call__:
            before = module.register_forward_pre_hook(
                lambda module, args, kwargs: self.begin_module(name, module, args, kwargs),
                with_kwargs=True,
            )
            after = module.register_forward_hook(
                lambda module, args, result: self.end_module(), always_call=True
            )
            try:
                yield
            finally:
                before.remove()
                after.remove()
            return

        def called(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.begin_module(name, this, args, kwargs)
            try:
                return kind.__call__(this, *args, **kwargs)
            finally:
                self.end_module()

        module.__class__ = type(kind.__name__, (kind,), {"__call__": called})
        try:
            yield
        finally:
            module.__class__ = kind


def _call(index: int, name: str, module: nn.Module, args: Any, kwargs: Any) -> ScopeCall:
    first = args[0] if args else None
    if isinstance(first, tuple | ResidualStream):  # codes with scales, or what a norm adds up
        first = first_of(first)
    shape = tuple(first.shape) if isinstance(first, Tensor) else ()
    dtype = first.dtype if isinstance(first, Tensor) else None
    given = dict(zip(("norm", "activation", "residual_TO"), args[1:], strict=False)) | kwargs
    norm = getattr(given.get("norm"), "weight", None)
    activation = given.get("activation")
    return ScopeCall(
        index,
        name,
        "module",
        shape,
        dtype,
        module,
        norm if isinstance(norm, Tensor) else None,
        activation if isinstance(activation, str) else None,
        given.get("residual_TO") is not None,
    )
