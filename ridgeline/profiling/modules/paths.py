"""Which module runs now: paths such as `encoder.layers.0.mlp`, for any callable, without a change
to it. Hooks for all modules of the process are there while it runs, and a range in the trace for
each call of one.

    names = names_of(train_step)              # modules that it holds, by where it holds them
    with Following(names) as following:
        train_step(batch)                     # following.path is the innermost module's, meanwhile

A callable's modules are those it is bound to, encloses, or names among its globals; one that is
found in none of these is called by its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.profiler import record_function

from ridgeline.profiling.tracing.scopes import Marks

MODULE_RANGE = "ridgeline.module "  # how the ranges of modules begin in a trace


def names_of(work: Callable[..., Any]) -> dict[nn.Module, str]:
    """Every module that it holds, with its path. The module itself has its class's name."""
    names: dict[nn.Module, str] = {}
    for prefix, root in _roots(work):
        for own, module in root.named_modules():
            names.setdefault(module, _path(prefix, own, root))
    return names


def parameters_of(names: Mapping[nn.Module, str]) -> Iterator[Tensor]:
    for module in names:
        yield from module.parameters(recurse=False)


def _path(prefix: str, own: str, root: nn.Module) -> str:
    """Wrappers that torch.compile puts around a module are no part of the path."""
    words = [word for word in (*prefix.split("."), *own.split(".")) if word]
    path = ".".join(word for word in words if word != "_orig_mod")
    return path or type(getattr(root, "_orig_mod", root)).__name__


def _roots(work: Any) -> Iterator[tuple[str, nn.Module]]:
    """Where modules are found, in the order of how much the place says."""
    if isinstance(work, nn.Module):
        yield "", work
        return
    if isinstance(work, partial):
        yield from _roots(work.func)
        for key, value in (*enumerate(work.args), *work.keywords.items()):
            yield from _held(str(key), value)
    code = getattr(work, "__code__", None)
    owner = getattr(work, "__self__", work if code is None else None)
    if owner is not None:
        yield from _held("", owner)
        for name, value in getattr(owner, "__dict__", {}).items():
            yield from _held(name, value)
        yield from _held("", getattr(owner, "module", None))  # of wrappers, ours among them
    if code is not None:
        yield from _enclosed(work, code)


def _enclosed(work: Any, code: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, cell in zip(code.co_freevars, work.__closure__ or (), strict=True):
        try:
            yield from _held(name, cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    for name in code.co_names:
        yield from _held(name, work.__globals__.get(name))


def _held(name: str, value: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value


class ScopeListener(Protocol):
    """What is told of modules that begin and end; they nest."""

    def begin(self, path: str) -> int: ...

    def end(self) -> None: ...


class Named:
    """Ranges in a trace that a reader understands."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def begin(self, path: str) -> int:
        entered = record_function(f"{MODULE_RANGE}{path}")
        entered.__enter__()
        self._open.append(entered)
        return len(self._open)

    def end(self) -> None:
        self._open.pop().__exit__(None, None, None)


class Numbered:
    """Scopes by their number, in the order in which they begin: for a clock or a trace."""

    def __init__(self, marks: Marks) -> None:
        self.paths: list[str] = []  # of each number
        self._marks = marks

    def begin(self, path: str) -> int:
        number = len(self.paths)
        self.paths.append(path)
        self._marks.begin(number)
        return number

    def end(self) -> None:
        self._marks.end()


class PathFollower:
    """Keeps the path of the module that runs, forward; modules may call each other, and raise."""

    def __init__(self, names: Mapping[nn.Module, str], scopes: ScopeListener | None = None) -> None:
        self.names, self.scopes = names, scopes
        self._running: list[str] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        return self._running[-1] if self._running else ""

    def __enter__(self) -> PathFollower:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        while self._running:
            self._end()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        path = self.names.get(module, type(module).__name__)
        if self.scopes is not None:
            self.scopes.begin(path)
        self._running.append(path)

    def _end(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
            if self.scopes is not None:
                self.scopes.end()
