"""Which files are read: those that patterns name, and of folders all that hold documents.

Names decide the order, so that it does not matter in which order patterns are given. A link inside
a folder is not followed: what it leads to is read under its own name, or was not meant. It is
refused with the reason, as every file is that cannot be read.

    input_files(["crawl/*.jsonl.gz", "my-dataset"])
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.data.corpus.units.unit import Kind, Packing
from ridgeline.errors import UsageError, near_matches

KINDS: dict[str, Kind] = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow",
    ".html": "html", ".htm": "html", ".xhtml": "html",
    ".warc": "warc", ".wet": "warc",
}  # fmt: skip
PACKINGS: dict[str, Packing] = {".gz": "gz", ".zst": "zst"}
DESCRIPTIONS = {"dataset_info.json", "state.json", "dataset_dict.json"}  # of Hugging Face folders
WILDCARDS = "*?["


@dataclass(frozen=True)
class InputFile:
    name: str
    kind: Kind
    packing: Packing = ""
    reason: str = ""  # why it is not read


def input_files(patterns: Sequence[str]) -> list[InputFile]:
    """In the order of names, each once."""
    files: dict[str, InputFile] = {}
    for pattern in patterns:
        for name in _matches(pattern):
            listed = _in_folder(name) if os.path.isdir(name) else [as_input(name)]
            files |= {file.name: file for file in listed}
    return [files[name] for name in sorted(files)]


def _matches(pattern: str) -> list[str]:
    if os.path.lexists(pattern) or not any(sign in pattern for sign in WILDCARDS):
        if not os.path.exists(pattern):
            parent = Path(pattern).parent
            others = [str(parent / name) for name in os.listdir(parent)] if parent.is_dir() else []
            raise UsageError(f"{pattern!r} does not exist{near_matches(pattern, others)}")
        return [os.path.normpath(pattern)]
    names = [os.path.normpath(name) for name in glob.glob(pattern, recursive=True)]
    if not names:
        raise UsageError(f"{pattern!r} matches no file; give files, folders or patterns with --in")
    return names


def _in_folder(folder: str) -> Iterator[InputFile]:
    """Every file below it whose name ends as documents do; links are refused."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*names, *folders]):
            path = os.path.join(parent, name)
            if os.path.islink(path):
                if os.path.isdir(path) or kind_of(name)[0] is not None:
                    yield InputFile(path, "refused", reason=_link_reason(path))
            elif name in names and kind_of(name)[0] is not None and name not in DESCRIPTIONS:
                yield as_input(path)


def _link_reason(path: str) -> str:
    target = os.readlink(path)
    if not os.path.exists(path):
        return f"a link to {target}, which does not exist or leads back to itself"
    return f"a link to {target}; links in folders are not followed: name its target with --in"


def as_input(name: str) -> InputFile:
    """A file that has no known ending is taken for plain text."""
    kind, packing = kind_of(name)
    if not os.path.isfile(name):
        return InputFile(name, "refused", reason="not a file")
    return InputFile(name, kind or "text", packing)


def kind_of(name: str) -> tuple[Kind | None, Packing]:
    stem, ending = os.path.splitext(name.lower())
    packing = PACKINGS.get(ending, "")
    if packing:
        ending = os.path.splitext(stem)[1]
    return KINDS.get(ending), packing
