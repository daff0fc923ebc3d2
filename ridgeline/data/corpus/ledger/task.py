"""A piece of work: files and arguments in, one file out, the same bytes each time.

    CorpusTask("documents/00012", map_unit, "documents/00012.parquet", arguments={"unit": unit})

Its key is the hash of all that its output depends on: a task whose key the ledger has is done.
`perform` runs one wherever it is called, in this process, another, or another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import OutputError, RidgelineError

VERSION = 2  # of what tasks write; raised when the same task writes other bytes
TEMPORARY = ".tmp"
WORK_FOLDER = ".build"  # of a corpus: what only its tasks need
PIECE_BYTES = 1 << 20
Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class CorpusTask:
    name: str
    work: Work  # of a module: work(output, inputs, **arguments) -> counts and other notes
    output: str  # below the build's folder
    inputs: tuple[str, ...] = ()  # outputs of earlier tasks
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready, or dataclasses of such
    num_bytes: int = 1  # its share of a stage's progress

    def key(self, hashes: Mapping[str, str]) -> str:
        """`hashes` are those of its inputs, by name."""
        content = [
            VERSION,
            f"{self.work.__module__}.{self.work.__qualname__}",
            self.output,
            dict(self.arguments),
            [hashes[name] for name in self.inputs],
        ]
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, default=asdict).encode()
        ).hexdigest()


@dataclass(frozen=True)
class TaskNote:
    """That a task is done."""

    name: str
    key: str
    output: str
    sha256: str
    num_bytes: int
    cpu_s: float
    counts: dict[str, Any]


def perform(folder: Path, task: CorpusTask, key: str) -> TaskNote:
    """Do it: its output is written beside its name, is on the disk, and then takes the name."""
    target = folder / task.output
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    start = time.process_time()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        counts = task.work(temporary, [folder / name for name in task.inputs], **task.arguments)
        digest = synced_hash(temporary)
        num_bytes = temporary.stat().st_size
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        if isinstance(error, RidgelineError) or not _is_of(error, target, temporary):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OutputError(f"cannot write {target}: {reason}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    used = time.process_time() - start
    return TaskNote(task.name, key, task.output, digest, num_bytes, used, counts)


def _is_of(error: OSError, *paths: Path) -> bool:
    """Whether it concerns what is written: writing to an open file names none."""
    own = {str(path) for path in paths} | {str(path.parent) for path in paths}
    return error.filename is None or str(error.filename) in own


def file_hash(path: Path) -> str:
    """Of its bytes, sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def synced_hash(path: Path) -> str:
    """The hash of a file that is on the disk when this returns."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return file_hash(path)


def sync_folder(folder: Path) -> None:
    """Names in it are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """What builders that were killed had begun to write."""
    for path in list(folder.rglob(f".*{TEMPORARY}")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
