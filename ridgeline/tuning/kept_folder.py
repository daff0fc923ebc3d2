"""A folder with work that a killed command goes on with: a study's, or a sweep's. It says what the
work is, one process at a time holds it, and half a line at the end of a file is cut off.

    with held_folder(Path("study"), config.to_json(), resume=False): ...
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ridgeline.errors import CheckpointError, OutputError, UsageError
from ridgeline.formats.files import atomic_write

Kind = Literal["study", "sweep"]
LOCK = ".lock"
VERSION = 1  # of what describes it


def description_path(folder: Path, kind: Kind = "study") -> Path:
    return folder / f"{kind}.json"


@contextmanager
def held_folder(
    folder: Path, description: Mapping[str, Any], *, resume: bool, kind: Kind = "study"
) -> Iterator[None]:
    """New or gone on with; UsageError lists what differs from its own."""
    check_folder(folder, description, resume, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error
    with _held(folder):
        path = description_path(folder, kind)
        if not path.is_file():
            with atomic_write(path) as file:
                json.dump({"version": VERSION} | dict(description), file, indent=2)
                file.write("\n")
        yield


def check_folder(
    folder: Path, description: Mapping[str, Any], resume: bool, kind: Kind = "study"
) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; give a folder")
    if not description_path(folder, kind).is_file():
        if resume:
            raise nothing_to_resume(folder, kind)
        if folder.is_dir() and any(each.name != LOCK for each in folder.iterdir()):
            raise UsageError(f"--out {folder} is not empty and no {kind}; give a new folder")
        return
    changed = differing(read_description(folder, kind), description)
    if changed:
        raise UsageError(
            f"--out {folder} is a {kind} of something else: {'; '.join(changed)}; give another "
            "folder, or the same flags"
        )
    if not resume:
        raise UsageError(f"--out {folder} has a {kind} already; add --resume, or give a new folder")


def nothing_to_resume(folder: Path, kind: Kind = "study") -> UsageError:
    return UsageError(f"--out {folder} has no {kind} to resume; remove --resume to begin one")


def read_description(folder: Path, kind: Kind = "study") -> dict[str, Any]:
    path = description_path(folder, kind)
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("version") != VERSION:
            raise ValueError(f"a version that this Ridgeline does not read, which is {VERSION}")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give a new folder") from error
    return values


def differing(saved: Mapping[str, Any], given: Mapping[str, Any], above: str = "") -> list[str]:
    """Fields that differ, in words: `space.lr.low 1e-05, was 0.0001`."""
    result = []
    own = json.loads(json.dumps(dict(given)))  # as a file would have it
    for name in dict.fromkeys([*saved, *own]):
        old, new = saved.get(name), own.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            result += differing(old, new, f"{above}{name}.")
        elif old != new:
            result.append(f"{above}{name} {new!r}, was {old!r}")
    return result


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Another process in the same folder is refused. The lock ends with the one that has it."""
    with open(folder / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"--out {folder} is being searched by another process; wait for its end, or give "
                "another folder"
            ) from None
        yield


def cut_half_line(path: Path) -> None:
    """What a killed process was writing."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
