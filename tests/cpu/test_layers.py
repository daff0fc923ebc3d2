"""Imports point downward only: a module may import from its own entry and from entries above it in
LAYERS, a room of a folder from the rooms above it in ROOMS, and no two files from each other.

Imports inside functions count, because a late import that hides a cycle is still a cycle; so do
those for type checkers alone. The lazy names of `ridgeline/__init__.py` and of `engine/__init__.py`
do not: they sit above everything and import nothing at module level.
"""

import ast
import subprocess
import sys
from collections.abc import Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_trees import PACKAGE, trees

LAYERS = [
    "version",
    "errors",
    "progress",
    "capture",
    "timing",
    "products",
    "formats",
    "hardware",
    "records",
    "kernels",
    "lessons",
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
    "tuning",
    "ladder",
    "server",
    "configs",
    "learn",
    "cli",
]

# Rooms of a folder, and the files that stand beside them, the lowest first.
ROOMS = {
    "data": [
        "vocabulary",
        "generation_config",
        "folder_vocabulary",
        "pre_tokenizers",
        "gguf_vocabulary",
        "template_sandbox",
        "chat_template",
        "incremental",
        "tokenizer_files",
        "tokenizer",
        "text_files",
        "parquet_files",
        "calibration_text",
        "judged_text",
        "workload",
        "traces",
        "corpus",
        "loading",
    ],
    "engine": [
        "requests",
        "grammars",
        "scheduling",
        "steps",
        "attention",
        "sampling",
        "memory",
        "loading",
        "execution",
        "speculation",
        "naive",
        "jobs",
        "backend",
        "local",
        "process",
        "replicas",
        "engine",
    ],
    "parallel": [
        "layout",
        "shards",
        "bubbles",
        "degrees",
        "context",
        "starting",
        "holdings",
        "inference",
        "pulse",
        "mesh",
        "collectives",
        "recording",
        "exposed",
        "agreeing",
    ],
    "profiling": [
        "printing",
        "roofline",
        "tracing",
        "predicting",
        "op_costs",
        "placing",
        "dividing",
        "model_profile",
        "step_kinds",
        "run_profile",
        "document",
        "drawing",
        "collective_rows",
        "training_profile",
        "rank_profile",
        "gap_words",
        "run_rows",
        "profile_page",
        "training_page",
        "modules",
    ],
    "training": [
        "methods",
        "config",
        "config_file",
        "schedule",
        "documents",
        "loss",
        "naive",
        "initial",
        "stepping",
        "ranks",
        "module_step",
        "evaluation",
        "memory",
        "watching",
        "saving",
        "choices",
        "starting_model",
        "prepare",
        "merge",
        "run",
    ],
    "planning": [
        "clusters",
        "training",
        "memory",
        "serving",
        "search",
        "validating",
        "output",
    ],
    "bench": [
        "collective_ranks",
        "collectives",
        "kernels",
        "engine",
        "compare",
        "llama_cpp",
        "peers",
        "prefix_replay",
        "scheduling",
        "start",
        "serve",
    ],
    "tuning": [
        "network_shapes",
        "short_run",
        "kept_folder",
        "searching",
        "rates",
        "scaling",
        "pages",
    ],
    "ladder": [
        "outcome",
        "state",
        "quantizing",
        "measuring",
        "reporting",
        "rungs",
        "order",
        "searching",
        "processes",
        "guessing",
        "climbing",
        "modules",
        "training",
        "filters",
        "recipe_search",
    ],
}
LAZY = {"ridgeline", "ridgeline.engine"}  # `__init__`s whose names are loaded on first use


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Absolute names of every module a file imports, wherever in it the import stands."""
    package = ["ridgeline", *path.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.walk(trees().get(path) or ast.parse(path.read_text())):
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
    return frozenset(found)


def layers_of(modules: Set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("ridgeline.")} & set(LAYERS)


def violations(path: Path) -> set[str]:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LAYERS[: LAYERS.index(own) + 1]
    return layers_of(imported_modules(path)) - set(allowed)


@pytest.mark.smoke
def test_imports_point_downward() -> None:
    files = [path for path in trees() if path.parent != PACKAGE or path.stem in LAYERS]
    wrong = {str(path.relative_to(PACKAGE)): violations(path) for path in files}
    assert {name: layers for name, layers in wrong.items() if layers} == {}


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
        "from ridgeline.engine.naive import reference_generate",
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


def name_of(path: Path) -> str:
    parts = ["ridgeline", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files_by_name() -> dict[str, Path]:
    return {name_of(path): path for path in trees()}


def imported_files(path: Path) -> set[str]:
    """The files of the package that one imports, each by its name."""
    if name_of(path) in LAZY:
        return set()
    found = imported_modules(path)
    names = {name for name in found if name in files_by_name()}
    # `from ridgeline.engine import Engine` names a module and what is in it: the longer name counts
    return {name for name in names if name not in LAZY} - {name_of(path)}


def test_no_two_files_import_each_other() -> None:
    graph = {name: imported_files(path) for name, path in files_by_name().items()}
    # a package stands for its `__init__`, which its own files do not import by naming it
    for name, targets in graph.items():
        graph[name] = {target for target in targets if not name.startswith(target + ".")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_downward(folder: str) -> None:
    order, wrong = ROOMS[folder], []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        own = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in order, f"{folder}/{own} has no place in ROOMS"
        for name in imported_files(path):
            parts = name.split(".")
            if parts[1] == folder and len(parts) > 2:
                allowed = order.index(parts[2]) <= order.index(own)
                wrong += [] if allowed else [f"{name_of(path)} imports {name}"]
    assert wrong == []


@pytest.mark.parametrize("room", ["engine", "engine.requests", "engine.scheduling"])
def test_no_torch_comes_with(room: str) -> None:
    """Every file of it, in a process that has imported nothing else."""
    names = [
        name
        for name in files_by_name()
        if name == f"ridgeline.{room}"
        or (room != "engine" and name.startswith(f"ridgeline.{room}."))
    ]
    code = f"import sys, {', '.join(sorted(names))}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
