"""Recipes: Python, TOML and JSON say the same; a wrong key or value names the near ones."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused

from ridgeline.cli import main
from ridgeline.configs import corpus
from ridgeline.configs.named import functions_of, named_recipe
from ridgeline.data.corpus.recipe import (
    CorpusRecipe,
    LanguageOptions,
    QualityOptions,
    ReadOptions,
    as_json,
    as_toml,
    load_recipe,
    parse_recipe,
)
from ridgeline.data.corpus.resources import BUILDER_BYTES, WORKER_BYTES, num_workers
from ridgeline.errors import UsageError

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", functions_of(corpus))
def test_a_recipe_is_the_same_in_every_form(name: str, tmp_path: Path) -> None:
    recipe = named_recipe(f"configs:{name}")
    for ending, text in ((".json", as_json(recipe)), (".toml", as_toml(recipe))):
        path = tmp_path / f"recipe{ending}"
        path.write_text(text)
        assert named_recipe(str(path)) == load_recipe(path) == recipe
    assert named_recipe(str(tmp_path)) == recipe  # a corpus's folder


def test_show_prints_what_can_be_built_from(tmp_path: Path, capsys: Capture) -> None:
    """Names, flags on top of them, and what is special in TOML."""
    own = tmp_path / "own.py"
    own.write_text(
        "from ridgeline.data.corpus.recipe import CorpusRecipe, ReadOptions\n"
        "def forum():\n    return CorpusRecipe(read=ReadOptions(separator='\\n\"--\"\\\\'))\n"
    )
    argv = ["data", "build", f"{own}:forum", "--min-words", "7", "--keep", "en", "de", "--show"]
    assert main(argv) == 0
    recipe = parse_recipe(tomllib.loads(capsys.readouterr().out), "shown")
    assert recipe == CorpusRecipe(
        read=ReadOptions(separator='\n"--"\\'),
        quality=QualityOptions(min_words=7),
        language=LanguageOptions(keep=("en", "de")),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qality": {}}, "'qality' 'quality'"),
        ({"quality": {"min_word": 3}}, "quality 'min_word' 'min_words'"),
        ({"quality": {"min_words": "3"}}, "min_words '3' whole number"),
        ({"quality": {"min_words": 9, "max_words": 8}}, "min_words 9 max_words 8"),
        ({"read": {"unit_mb": 65}}, "unit_mb 65 from 1 to 64"),
        ({"language": {"keep": ["english"]}}, "'english' ISO 639"),
        ({"language": {"keep": ["en"], "identify": "off"}}, "identify off"),
        ({"duplicates": {"threshold": 1.5}}, "threshold 1.5"),
        ({"evaluations": {"sets": ["mmlu"]}}, "'mmlu' NAME=FILE"),
        ({"version": 2}, "version 2 version 1"),
        ({"quality": 3}, "quality object"),
    ],
)
def test_a_wrong_recipe_is_one_line(
    change: dict[str, object], words: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(json.loads(as_json(CorpusRecipe())) | change))
    refused(capsys, UsageError, words, "data", "build", str(path), "--show")


def test_files_that_are_no_recipe(tmp_path: Path, capsys: Capture) -> None:
    for name, content, words in (
        ("a.toml", "version = ", "a.toml is not TOML"),
        ("a.json", "[", "a.json is not JSON"),
        ("b.json", "[]", "expected an object"),
    ):
        (tmp_path / name).write_text(content)
        refused(capsys, UsageError, words, "data", "build", str(tmp_path / name), "--show")
    refused(capsys, UsageError, "cannot read", "data", "build", f"{tmp_path}/c.toml", "--show")
    refused(capsys, UsageError, "'web_enlish' 'web_english'", "data", "build",
            "configs:web_enlish", "--show")  # fmt: skip
    refused(capsys, UsageError, "returned a TrainConfig CorpusRecipe", "data", "build",
            f"{training_file(tmp_path)}:run", "--show")  # fmt: skip


def training_file(folder: Path) -> Path:
    path = folder / "runs.py"
    path.write_text("from ridgeline.configs.training import lora_demo\ndef run():\n"
                    "    return lora_demo()\n")  # fmt: skip
    return path


def test_escapes_of_a_separator() -> None:
    assert ReadOptions(separator=r"\n\n").mark == "\n\n"
    assert replace(ReadOptions(), separator="\n\t").mark == "\n\t"


def test_workers_fit_into_the_memory_given() -> None:
    gib = 1 << 30
    assert num_workers(None, None, 8) == 8
    assert num_workers(3, None, 8) == 3
    for count in (1, 2, 5):
        enough = (BUILDER_BYTES + count * WORKER_BYTES) / gib
        assert num_workers(None, enough + 0.001, 8) == count
        assert num_workers(count, enough + 0.001, 8) == count
        with pytest.raises(UsageError, match="no room for"):
            num_workers(count, enough - 0.01, 8)
    assert num_workers(None, 1000.0, 8) == 8
