"""README and docs are true: their code runs, their commands parse, the files they name exist, and
their figures are those of the records they link to.

    ```python            run, all blocks of a document one after the other, on the embedded model
    ```python excerpt    stands in a source file just so
    ```python client     is only compiled: it needs a server
    ```python lesson     stands in a lesson, which test_learn.py runs
    ```sh                `ridgeline …` lines go through the real parsers, `make …` names a target
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ridgeline import errors
from ridgeline.cli import early

command_line = import_module("ridgeline.cli.main")  # the package has a function of that name
ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "learn").glob("*.md"),
        *(ROOT / "docs" / "how-to").glob("*.md"),
        *(
            ROOT / name
            for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")
        ),
    ]
)
WIDTH = 100
# What a test need not wait for: a model of 110M parameters, torch.compile, many tokens.
SMALLER = {
    "BertConfig(": "BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, "
    "num_attention_heads=2, ",
    "max_error=0.02)": "max_error=0.02, skip=('compile',))",
    "max_tokens=32": "max_tokens=4",
    "max_tokens=64": "max_tokens=4",
    'engine.add("Why?", ': 'engine.add("Why?", Sampling(max_tokens=4), ',
    '"Why is the sky blue?"}])[0])': '"Why?"}], Sampling(max_tokens=4))[0])',
}
# For the second tier.
LASTING = {"README.md", "docs/engine.md", "docs/modules.md", "docs/profile.md"}
PLACEHOLDERS = {"NAME", "DIR", "MODEL", "FILE"}

named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    kind: str  # the second word behind the fence, or none
    text: str


def blocks(document: Path) -> Iterator[Block]:
    for head, text in re.findall(r"^ *```(\S.*?)\n(.*?)^ *```$", document.read_text(), re.M | re.S):
        language, _, kind = head.partition(" ")
        yield Block(language, kind, text)


def prose(document: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.M | re.S)


def shell_lines(document: Path) -> list[str]:
    texts = [
        block.text.replace("\\\n", " ") for block in blocks(document) if block.language == "sh"
    ]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def commands(lines: list[str]) -> list[list[str]]:
    """Every `ridgeline …` among lines of shell, as words, without the file that output goes to."""
    parts = [part for line in lines for part in re.split(r"&&|\|\|", line)]
    parts = [re.sub(r" > \S+$", "", part) for part in parts]
    words = [shlex.split(part, comments=True) for part in parts]
    return [each[1:] for each in words if each[:1] == ["ridgeline"]]


@named
def test_lines_have_one_width(document: Path) -> None:
    lines = document.read_text().splitlines()
    wide = [
        f"{number}: {line}"
        for number, line in enumerate(lines, 1)
        if len(line) > WIDTH
        and not line.lstrip().startswith(("|", "[", "!"))  # a table's row is one line
    ]
    assert wide == []


@named
def test_links_lead_somewhere(document: Path) -> None:
    text = prose(document)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(
        r"^\[[^\]]+\]: (\S+)", text, re.M
    )
    lost = [
        target
        for target in targets
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert lost == []
    references = set(re.findall(r"\]\[([^\]]+)\]", text))
    assert references == set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))


@cache
def known_files() -> set[str]:
    """Every tracked file by each end of its path: `engine/naive.py` and `naive.py` too."""
    folders = ("ridgeline", "tests", "docs", "results", "deploy", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files += list(ROOT.iterdir())
    parts = [path.relative_to(ROOT).parts for path in files]
    return {"/".join(own[start:]) for own in parts for start in range(len(own))}


WRITTEN = {  # by a command, or on a user's machine
    *("recipe.json", "report.html", "climb.json", "records.json", "check.json", "finished.json"),
    *("config.json", "tokenizer.json", "report.json", "trace.json", "profile.html", "keys.txt"),
    *("predictions.jsonl", "my.txt", "measured.txt", "trace.csv", "demo-optimized/report.html"),
    *("out/report.html", "work/", "out/climb.json", "DIR/recipe.json", "script.py", "openapi.json"),
    *(
        "generation_config.json",
        "tokens.json",
        "index.json",
        "mixture.json",
        "train.json",
        "state.json",
        "checkpoints/",
    ),
    *("files.json", "adapter_config.json", "tensorboard/", "RUN-job/train.json", "job.py"),
    *("index.json", "mixture.json", "plan-1.json", "plan.json", "plan.html"),
}


@named
def test_files_that_are_named_exist(document: Path) -> None:
    words = re.findall(
        r"`(?:ridgeline/)?([\w./-]+(?:\.(?:py|cu|cuh|cpp|h|json|md|yml)|/))`", prose(document)
    )
    words = [word for word in words if not PLACEHOLDERS & set(word.split("/"))]
    missing = {word for word in words if word.strip("/") not in known_files()} - WRITTEN
    missing = {word for word in missing if "*" not in word and not word.startswith(("~", "/"))}
    assert missing == set()


class ParsedError(Exception):
    """The parser took the command; nothing is run."""


@named
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise ParsedError

    monkeypatch.setattr(early, "begin", lambda: None)
    for words in commands(shell_lines(document)):
        monkeypatch.setattr(import_module(f"ridgeline.cli.{words[0]}"), "run", stop)
        with pytest.raises(ParsedError):
            command_line.run(words)


@named
def test_commands_in_prose_have_flags_that_exist(document: Path) -> None:
    for text in re.findall(r"`ridgeline ([a-z][^`]*)`", prose(document)):
        verb = text.split()[0]
        assert verb in command_line.VERBS, text
        assert set(re.findall(r"(--[a-z][a-z-]*)", text)) <= flags_of(verb), text


@cache
def flags_of(verb: str) -> set[str]:
    parser = command_line.top_level_parser()
    command_line.add_verb_arguments(parser, verb, import_module(f"ridgeline.cli.{verb}"))
    subparsers = [parser]
    for each in subparsers:  # grows as it is walked
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                subparsers += action.choices.values()
    return {
        flag for each in subparsers for action in each._actions for flag in action.option_strings
    }


@named
def test_make_targets_exist(document: Path) -> None:
    text = prose(document) + "\n".join(shell_lines(document))
    targets = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.M))
    assert targets <= make_targets()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def python_blocks() -> dict[str, list[Block]]:
    found = {
        str(path.relative_to(ROOT)): [b for b in blocks(path) if b.language == "python"]
        for path in DOCUMENTS
    }
    return {name: each for name, each in found.items() if any(not b.kind for b in each)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in LASTING else name
        for name in python_blocks()
    ],
)
def test_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in python_blocks()[name]:
        text = block.text
        for usual, smaller in SMALLER.items():
            text = text.replace(usual, smaller)
        if not block.kind:
            exec(compile(text, f"{name} {block.text.splitlines()[0]!r}", "exec"), namespace)


def test_excerpts_stand_in_the_source() -> None:
    sources = [path.read_text() for path in (ROOT / "ridgeline").rglob("*.py")]
    sources = [re.sub(r'""".*?"""', "", source, flags=re.S) for source in sources]
    squeezed = ["".join(source.split()) for source in sources]
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.kind == "client":
                compile(block.text, document.name, "exec")
            if block.kind == "excerpt":
                text = "".join(block.text.split())
                assert any(text in source for source in squeezed), block.text


@cache
def numbers(path: Path) -> list[float]:
    """Every number of a record's values and shares."""
    found: list[float] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))

    document = json.loads(path.read_text())
    for record in document.get("records", [document]):
        walk(record.get("values", record))
    return found


def shown(word: str, values: list[float]) -> bool:
    """Whether a figure is one of the values as it would be printed, in any unit of ten's powers."""
    figure = float(word.replace(",", ""))
    digits = len(word.partition(".")[2])
    scales = [10.0**power for power in (-12, -9, -6, -3, 0, 2, 3, 6)]
    return any(round(v * scale, digits) == figure for v in values for scale in scales)


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_bold_figures_are_those_of_their_records(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    targets = dict(re.findall(r"^\[([^\]]+)\]: (\S+)", text, re.M))
    checked, wrong = 0, []
    for line in re.findall(r"^\|.*", text, re.M):
        links = re.findall(r"\[json\](?:\[([^\]]+)\]|\(([^)]+)\))", line)
        paths = [document.parent / (targets[key] if key else path) for key, path in links]
        values = [value for path in paths for value in numbers(path)]
        for word in re.findall(r"\*\*([\d,.]+)×?\*\*", line):
            if paths:
                checked += 1
                wrong += [] if shown(word, values) else [f"{word} in {line}"]
    assert wrong == []
    assert checked >= 5


def test_the_picture_is_drawn_from_its_record() -> None:
    drawn = subprocess.run(
        [sys.executable, ROOT / "docs/draw_climb.py"], capture_output=True, text=True, check=True
    )
    assert drawn.stdout == (ROOT / "docs/climb.svg").read_text()


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (?:`(\w+)`)? ?\|", (ROOT / "docs/exit-codes.md").read_text(), re.M
    )
    told = {name: int(code) for code, name in rows if name}
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    kinds = [kind for kind in kinds if kind.__mro__[1] is errors.RidgelineError]
    assert told == {kind.__name__: kind.exit_code for kind in kinds}
    others = {int(code) for code, name in rows if not name}
    assert others == {0, 13, 70, 130}


def test_the_glossary_is_short() -> None:
    """Of words that the project gives a meaning of its own; those of the field are the course's."""
    own, field = (ROOT / "docs/glossary.md").read_text().split("## Words of the field")
    words = re.findall(r"^\| ([a-z ]+) \|", own, re.M)
    words.remove("word")
    assert words == sorted(words)
    assert len(words) <= 25
    others = re.findall(r"^\| ([\w. '-]+) \|", field, re.M)[1:]
    assert others == sorted(others, key=str.lower)


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [path.read_text() for path in (*DOCUMENTS, *(ROOT / "ridgeline").rglob("*.py"))]
    groups = [
        each for text in texts for each in re.findall(r"(?:ridgeline|\.)\[([a-z,]+)\]'", text)
    ]
    extras = {extra for group in groups for extra in group.split(",")}
    assert extras <= set(project["optional-dependencies"])
    assert "serve" in extras
