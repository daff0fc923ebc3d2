"""The Jinja environment that chat templates run in.

jinja2's immutable sandbox keeps a template from reaching Python's internals or changing its input.
This adds the bounds it lacks: on the rendered text, on values built by operators, and on time. They
stop the usual runaway templates; only a memory limit on the process stops all of them.

    text = render_bounded(TemplateEnvironment().from_string(source), values)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 16 * 2**20  # of the text and of any string; a million tokens are about 5 MB
MAX_ITEMS = 10**6  # of a list, and the largest width given to a method of a string
MAX_BITS = 4096  # of a product or power of integers
MAX_SECONDS = 5.0  # for one rendering

_deadline: ContextVar[float] = ContextVar("deadline of the current rendering")


class TemplateTooLargeError(Exception):
    """A template exceeded one of the bounds above."""


def render_bounded(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """The rendered text of a template compiled in a `TemplateEnvironment`."""
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        return _join(template.generate(values))
    finally:
        _deadline.reset(token)


def _join(parts: Iterable[Any], separator: str = "") -> str:
    texts, num_characters = [], 0
    for part in parts:
        texts.append(str(part))
        num_characters += len(texts[-1]) + len(separator)
        _check(num_characters, MAX_CHARACTERS, "characters in a text")
    return separator.join(texts)


def _check(size: int, limit: int, kind: str) -> None:
    if size > limit:
        raise TemplateTooLargeError(f"more than {limit} {kind}")


@jinja2.pass_context  # a filter that takes the context is not evaluated while compiling
def _check_time(context: Any, value: str) -> str:
    if time.monotonic() > _deadline.get():
        raise TemplateTooLargeError(f"it runs for more than {MAX_SECONDS:g} s")
    return value


class _AddChecks(NodeTransformer):
    """Checks the time in every loop and macro, and the length of every `a ~ b`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._timed(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._timed(node)

    def _timed(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        check = _filter(nodes.Const("", lineno=node.lineno), "_check_time")
        node.body.insert(0, nodes.Output([check], lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates from checkpoints; `render_bounded` runs them."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(_check_time=_check_time, _concatenate=_join)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _AddChecks().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}
            _check(bits.get(operator, 0), MAX_BITS, "bits in a number")
        for value, other in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple):
                size = len(value) * other if isinstance(other, int) else len(value)
                size += len(other) if isinstance(other, str | list | tuple) else 0
                is_text = isinstance(value, str)
                _check(size, MAX_CHARACTERS if is_text else MAX_ITEMS, "items in a value")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str):  # ljust, zfill and the like
            for value in (*args, *kwargs.values()):
                _check(value if isinstance(value, int) else 0, MAX_ITEMS, "characters of width")
        return super().call(context, function, *args, **kwargs)
