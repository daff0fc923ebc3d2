"""Lines that are kept over runs in a file, of the user's cache folder for one: added by several
processes at once, and the oldest dropped where there are many, unless all are to be kept.

    append_lines(path, ['{"device": "NVIDIA H200"}'])
    read_lines(path)            # [b'{"device": "NVIDIA H200"}']
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ridgeline.formats.files import atomic_write

MAX_LINES = 2000  # a file that has more keeps the latest half


def append_lines(path: Path, lines: Iterable[str], *, keep_all: bool = False) -> None:
    """A disk that cannot be written is an OSError or an OutputError. With `keep_all` no line is
    ever dropped, and all are on the disk when this returns.
    """
    text = "".join(f"{line}\n" for line in lines)
    if not text:
        return
    with _locked(path):
        _append(path, text, sync=keep_all)
        if not keep_all:
            _keep_latest(path)


def read_lines(path: Path) -> list[bytes]:
    """Those with something in them; none where there is no file."""
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return []


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: two climbs may end together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _append(path: Path, text: str, sync: bool) -> None:
    """In one write. Half a line at the end, left by a full disk, is ended first."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.lseek(handle, 0, os.SEEK_END)
        is_whole = size == 0 or os.pread(handle, 1, size - 1) == b"\n"
        os.write(handle, ("" if is_whole else "\n").encode() + text.encode())
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def _keep_latest(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > MAX_LINES:
        with atomic_write(path, "wb") as file:
            file.writelines(lines[-MAX_LINES // 2 :])
