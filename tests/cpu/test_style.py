"""House rules that a machine can check: no tuple of unlike things splatted by position, one class
of each name, no function over 80 lines, no file over 450, no variable called `found` or `about`.

A tuple is taken for a record, a list for things of one kind: `f(*columns)` is fine for a list. GPU
kernels are excused: a `@triton.jit` function may be long, and so may the files of kernels/.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from source_trees import PACKAGE, trees

MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 450
# A name says what a thing is, not how it came: `offer`, `rows`, `settings`.
VAGUE_NAMES = {"about", "asked", "found", "said", "seen", "told"}
NOT_YET_PLAIN = ("bench/serve/", "kernels/", "server/")  # which still have some
NUM_UNLIKE = 3  # names in a tuple from which on it counts as a record

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


LOOKED_AT = FunctionNode | ast.ClassDef | ast.arg | ast.Name | ast.Assign | ast.AnnAssign


@cache
def modules() -> dict[str, list[ast.AST]]:
    """Of each file the nodes that a rule is about: a third of all."""
    return {
        str(path.relative_to(PACKAGE)): [
            node for node in ast.walk(tree) if isinstance(node, LOOKED_AT)
        ]
        for path, tree in trees().items()
    }


def functions(nodes: Iterable[ast.AST]) -> Iterator[FunctionNode]:
    return (node for node in nodes if isinstance(node, FunctionNode))


def is_kernel(function: FunctionNode) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def unlike_tuples(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that a tuple of several names, attributes or calls is assigned to. A tuple that unpacks
    another (`(*shape, 3)`) counts when what stands beside it is several things too.
    """
    names = set()
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if not isinstance(node.value, ast.Tuple):
            continue
        parts = {
            ast.unparse(part)
            for part in node.value.elts
            if not isinstance(part, ast.Constant | ast.Starred)
        }
        if len(parts) >= NUM_UNLIKE:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def splats(scope: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each `function(*name)` where the name holds such a tuple."""
    names = unlike_tuples(ast.walk(scope))
    if not names:
        return
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                continue
            value = argument.value
            if isinstance(value, ast.Name) and value.id in names:
                yield node.lineno, value.id


@pytest.mark.smoke
def test_no_record_is_splatted_by_position() -> None:
    wrong = {
        f"{name}:{line} *{splatted}"
        for name, nodes in modules().items()
        if unlike_tuples(nodes)  # or every function would be looked through for nothing
        for function in functions(nodes)
        for line, splatted in splats(function)
    }
    assert sorted(wrong) == [], "pass these by keyword, or as a dataclass"


@pytest.mark.smoke
def test_a_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for nodes in modules().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    )
    assert sorted(name for name, count in names.items() if count > 1) == []


@pytest.mark.smoke
def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{name}: {function.name}"
        for name, nodes in modules().items()
        for function in functions(nodes)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
        and not is_kernel(function)
    }
    assert sorted(long) == []


@pytest.mark.smoke
def test_files_hold_one_idea() -> None:
    long = {
        name
        for name in modules()
        if not name.startswith("kernels/")
        and len((PACKAGE / name).read_text().splitlines()) > MAX_FILE_LINES
    }
    assert sorted(long) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def f(x, w):\n    about = (x, w, x.dtype)\n    return g(*about)", True),
        ("def f(x, w):\n    about = (x, w)\n    return g(*about)", False),
        ("def f(x, w):\n    shape = (3, 4, 5)\n    return g(*shape)", False),
        ("def f(x, w, b):\n    about = (*x, w, b, 1)\n    return g(*about)", False),
        ("def f(x, w, b):\n    about = (*x, w, b, x)\n    return g(*about)", True),
        ("def f(x, w, b):\n    inputs = (x, w, b)\n    return [g(*inputs), *inputs]", True),
        ("def f(x, w, b):\n    inputs = (x, w, b)\n    return sum(inputs)", False),
    ],
)
def test_records_and_lists_are_distinguished(source: str, wrong: bool) -> None:
    (function,) = functions(ast.walk(ast.parse(source)))
    assert bool(list(splats(function))) is wrong


def given_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Of functions, their arguments, and what is assigned to."""
    names = set()
    for node in nodes:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.smoke
def test_names_say_what_a_thing_is() -> None:
    vague = {
        name: sorted(given_names(nodes) & VAGUE_NAMES)
        for name, nodes in modules().items()
        if not name.startswith(NOT_YET_PLAIN)
    }
    assert {name: names for name, names in vague.items() if names} == {}


def test_a_vague_name_is_seen() -> None:
    for source in ("found = 1", "def f(asked): ...", "for told in x: ...", "def about(): ..."):
        assert given_names(ast.walk(ast.parse(source))) & VAGUE_NAMES
