"""The folder that a climb leaves: a checkpoint that `ridgeline serve` takes (codes where a scheme
was kept, else links to the unmodified files), `recipe.json`, `records.json`, `climb.json`,
`report.html`, `card.svg`; and `work/` with what a stopped climb goes on from.

    folder = Folder(Path("out"))
    folder.prepare(resume=False)
    folder.link(Path("model"))
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.errors import OutputError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.ladder.reporting.saved import FILE_NAME as CLIMB
from ridgeline.models.checkpoint.gguf import part_paths
from ridgeline.recipe import FILE_NAME, Recipe, dotted_values, flag

RECORDS, REPORT, CHECK, CARD = "records.json", "report.html", "check.json", "card.svg"
BEGUN = "begun.json"  # in work/: there is a climb here
PLACED = "placed.json"  # in work/: the checkpoint's files, which a later climb replaces
OURS = (CLIMB, RECORDS, REPORT, CHECK, CARD, FILE_NAME)


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / "work"

    def prepare(self, resume: bool) -> None:
        """An error before anything is measured, where nothing could be written."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file; name a folder")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not resume:
                raise UsageError(
                    f"--out {self.path} exists and is not empty; add --resume to continue that "
                    "run, or choose another folder"
                )
            if not self.work.is_dir() and not (self.path / CLIMB).is_file():
                raise UsageError(f"--out {self.path} holds no climb to go on with; name another")
        with atomic_write(self.work / BEGUN) as file:
            json.dump({"resumed": resume}, file)

    def abandon(self) -> None:
        """Nothing was measured: where nothing else is in it, the folder goes too."""
        (self.work / BEGUN).unlink(missing_ok=True)
        for folder in (self.work, self.path):
            with suppress(OSError):
                folder.rmdir()

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        with atomic_write(self.path / name) as file:
            json.dump(document, file, indent=2, allow_nan=False)
            file.write("\n")

    def link(self, source: Path) -> None:
        """To the unmodified checkpoint's files."""
        files = part_paths(source) if source.is_file() else sorted(source.iterdir())
        self._clear()
        kept = [file for file in files if file.is_file() and file.name not in OURS]
        for file in kept:
            self._made(lambda file=file: (self.path / file.name).symlink_to(file.resolve()))
        self._note(file.name for file in kept)

    def take(self, source: Path, move: bool) -> None:
        """The files of a checkpoint that was written for this folder."""
        self._clear()
        files = sorted(file for file in source.iterdir() if file.is_file())
        for file in files:
            self._made(lambda file=file: _place(file, self.path / file.name, move))
        self._note(file.name for file in files)

    def _made(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write the checkpoint into {self.path}: {reason}") from error

    def _clear(self) -> None:
        """Take away what an earlier climb has placed here, and nothing else."""
        try:
            names = json.loads((self.work / PLACED).read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError):
            names = []
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def _note(self, names: Iterable[str]) -> None:
        with atomic_write(self.work / PLACED) as file:
            json.dump({"files": list(names)}, file)


def _place(source: Path, target: Path, move: bool) -> None:
    if move:
        shutil.move(source, target)
        return
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def saved_recipe(filled: Recipe, in_checkpoint: bool) -> Recipe:
    """What stands beside the checkpoint: nothing that was chosen is left open. The context and the
    share of the memory were those of measuring, and are for whoever serves. Codes that lie in the
    checkpoint need no scheme.
    """
    limits = replace(filled.limits, max_context=None, memory_share=None)
    return replace(filled, limits=limits, scheme=None if in_checkpoint else filled.scheme)


def recipe_flags(recipe: Recipe) -> list[str]:
    """The recipe as a command line has it, where it differs from the defaults."""
    usual, words = dotted_values(Recipe()), []
    for name, value in dotted_values(recipe).items():
        if value == usual[name] or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            words += [flag(name), str(value)]
    return words
