"""Imports point downward only: a module may import from its own entry and from entries above it in
LAYERS.

Imports inside functions count, because a late import that hides a cycle is still a cycle. So do the
lazy names of `ridgeline/__init__.py`, which sits above everything and may therefore import nothing
at module level.
"""

import ast
from pathlib import Path

import pytest

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent

LAYERS = [
    "errors",
    "progress",
    "capture",
    "timing",
    "products",
    "formats",
    "hardware",
    "records",
    "kernels",
    "models",
    "quantization",
    "parallel",
    "recipe",
    "data",
    "engine",
    "training",
    "quality",
    "profiling",
    "planning",
    "bench",
    "ladder",
    "server",
    "cli",
]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of every module a file imports, wherever in it the import stands."""
    package = ["ridgeline", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def layers_of(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("ridgeline.")} & set(LAYERS)


def violations(path: Path) -> set[str]:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LAYERS[: LAYERS.index(own) + 1]
    return layers_of(imported_modules(path)) - set(allowed)


FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LAYERS
)


@pytest.mark.smoke
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    assert violations(path) == set()


@pytest.mark.smoke
def test_every_module_has_a_place_in_the_order() -> None:
    entries = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    assert entries - set(LAYERS) == {"__init__", "__main__"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "source",
    [
        "import ridgeline.cli",
        "from ridgeline import engine",
        "from ridgeline.engine.naive import generate",
        "from ...engine import naive",
        "def late():\n    from ridgeline.engine import naive",
        "import importlib\nimportlib.import_module('ridgeline.engine')",
    ],
)
def test_a_wrong_import_is_seen(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    path = tmp_path / "models" / "families" / "wrong.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(path)
