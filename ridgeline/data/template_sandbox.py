"""A Jinja environment for templates that nobody has read: no way out, and bounds on memory and
time.

jinja2's immutable sandbox closes the ways out (underscore attributes, changes to what was passed
in). This adds bounds that it lacks: on the text produced, on strings, lists and numbers built on
the way, and on the rounds of loops and macros. Operators, filters and methods that make long values
look at the length before they make them. The usual attacks end in an error within seconds; a limit
on the process is still what contains a determined one.

    with bounded_rendering() as bound:
        text = bound.join(BoundedEnvironment().from_string(source).generate(values))
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = (
    16 * 2**20
)  # of the rendered text and of any string; a million tokens are about 5 MB
MAX_ITEMS = 10**6  # of a list, and the most that a width or count may be
MAX_ROUNDS = 10**6  # of all loops and macros of one rendering
MAX_SECONDS = 5.0  # of one rendering; looked at in every round
MAX_BITS = 4096  # of a product or power

# Filters and methods that no chat template needs and that make long values out of short ones.
_REMOVED_FILTERS = ("center", "pprint", "urlize", "wordwrap", "xmlattr")
_REMOVED_METHODS = frozenset(
    {"encode", "expandtabs", "format_map", "maketrans", "to_bytes", "translate"}
)

_WIDE_FORMAT = re.compile(
    r"\d{5}|%[^a-zA-Z%]*\*|:[^}]*\{"
)  # a five-digit width, or one that a value gives


class TemplateTooLargeError(Exception):
    """A bound was reached."""


class RenderingBudget:
    """What one rendering has used so far."""

    def __init__(self) -> None:
        self._rounds = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def count_round(self) -> None:
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise TemplateTooLargeError(f"its loops take more than {MAX_ROUNDS} rounds")
        if time.monotonic() > self._deadline:
            raise TemplateTooLargeError(f"it runs for more than {MAX_SECONDS:g} s")

    def join(self, parts: Iterable[str]) -> str:
        """The rendered text, given up as soon as it is too long."""
        kept: list[str] = []
        characters = 0
        for part in parts:
            characters += len(part)
            _check_length(characters, "")
            kept.append(part)
        return "".join(kept)


_current: ContextVar[RenderingBudget] = ContextVar("the rendering under way")


@contextmanager
def bounded_rendering() -> Iterator[RenderingBudget]:
    token = _current.set(RenderingBudget())
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def _check_length(length: int, kind: object) -> None:
    """`kind` is a value of the type that would get this length."""
    limit, unit = (MAX_CHARACTERS, "characters") if isinstance(kind, str) else (MAX_ITEMS, "items")
    if length > limit:
        raise TemplateTooLargeError(f"it builds a value of more than {limit} {unit}")


def _check_counts(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_ITEMS:
            raise TemplateTooLargeError(
                f"it asks for a width or count of {value}; {MAX_ITEMS} is the most"
            )


def _check_format(text: Any, values: Iterable[Any]) -> None:
    if not isinstance(text, str):
        return
    if _WIDE_FORMAT.search(text):
        raise TemplateTooLargeError(f"it formats with a width that it may not use: {text[:40]!r}")
    longest = max((len(str(value)) for value in values), default=0)
    _check_length(len(text) + max(text.count("{"), text.count("%")) * longest, "")


def _join(separator: str, values: Iterable[Any]) -> str:
    parts = [str(value) for value in values]
    _check_length(sum(map(len, parts)) + len(separator) * len(parts), "")
    return separator.join(parts)


def _replace(text: Any, old: Any, new: Any, count: int | None = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_length(len(text) + text.count(old) * len(new), "")
    return str(text.replace(old, new, -1 if count is None else count))


@jinja2.pass_environment
def _join_filter(
    environment: jinja2.Environment, values: Iterable[Any], d: Any = "", attribute: Any = None
) -> str:
    if attribute is not None:
        values = map(filters.make_attrgetter(environment, attribute), values)
    return _join(str(d), values)


def _indent_filter(
    text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = str(text)
    lines = text.count("\n") + 1
    _check_length(len(text) + lines * (len(width) if isinstance(width, str) else width), "")
    return filters.do_indent(text, width, first, blank)


def _format_filter(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text), [*args, *kwargs.values()])
    return filters.do_format(str(text), *args, **kwargs)


@jinja2.pass_context
def _count_round(context: Any, value: str) -> str:
    """Stands in every loop and macro; as it takes the context, jinja2 does not fold it away."""
    _current.get().count_round()
    return value


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    """Jinja's `namespace()`, with no names that Python gives a meaning."""
    values = dict(*args, **kwargs)
    for name in values:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}")
    return Namespace(values)


class _Rewrite(NodeTransformer):
    """Counts rounds of loops and macros, makes `a ~ b` a bounded join, refuses `ns._name = …`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_counter(node.lineno), *node.body]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_counter(node.lineno), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise jinja2.TemplateSyntaxError(f"a namespace may not hold {node.attr!r}", node.lineno)
        return node


def _counter(lineno: int) -> nodes.Output:
    empty = nodes.Const("", lineno=lineno)
    count = nodes.Filter(empty, "_count_round", [], [], None, None, lineno=lineno)
    return nodes.Output([count], lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates are compiled in. Its templates run inside `bounded_rendering`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters.update(
            _count_round=_count_round,
            format=_format_filter,
            indent=_indent_filter,
            join=_join_filter,
            replace=_replace,
        )
        for name in ("batch", "round", "slice"):
            self.filters[name] = counted(self.filters[name])
        del self.globals["lipsum"]
        self.globals["namespace"] = _namespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Rewrite().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | int) and attr in _REMOVED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "*" and numbers:
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and numbers:
            _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    _check_length(len(value) * count, value)
        elif operator == "+" and isinstance(left, str | list | tuple) and type(left) is type(right):
            _check_length(len(left) + len(right), left)
        elif operator == "%":
            _check_format(left, right if isinstance(right, tuple) else [right])
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, BuiltinFunctionType):
            owner, name = function.__self__, function.__name__
            if isinstance(owner, str) and name == "join":
                return _join(owner, *args, **kwargs)
            if isinstance(owner, str) and name == "replace":
                return _replace(owner, *args, **kwargs)
            _check_counts([*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateTooLargeError(f"it computes a number of more than {MAX_BITS} bits")


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose counts and widths are looked at before it runs."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_counts([*args, *kwargs.values()])
        return function(value, *args, **kwargs)

    return checked
