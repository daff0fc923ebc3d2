"""Files that are whole or absent, and JSON objects without surprises.

Everything Ridgeline writes for later (records, caches, recipes, checkpoints) goes through
`atomic_write`, so that a full disk or a Ctrl-C leaves the old file, or none, and never half a new
one.

    with atomic_write("out/recipe.json") as file:
        json.dump(document, file)
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from ridgeline.errors import OutputError, RidgelineError, UsageError, near_matches


@contextmanager
def atomic_write(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A handle beside `path` that becomes `path` when the block ends well; folders are made.

    When writing fails the temporary file is removed and OutputError names `path` and the reason.
    Any other error raised in the block passes through, after the same clean-up.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and _is_about(error, path, temporary):
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OutputError(f"cannot write {path}: {reason}") from error
        raise


def _is_about(error: OSError, path: Path, temporary: Path) -> bool:
    """Whether an error concerns the file being written, not one that the block read from."""
    if isinstance(error, RidgelineError):
        return False
    own = {str(path), str(temporary), *(str(parent) for parent in path.parents)}
    return error.filename is None or str(error.filename) in own


def reject_unknown_keys(keys: Iterable[str], allowed: Collection[str], what: str) -> None:
    """Raise UsageError for the first key of a JSON object that its schema does not have."""
    for key in keys:
        if key not in allowed:
            hint = near_matches(key, allowed)
            raise UsageError(f"{what} has an unknown key {key!r}{hint}")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file; `what` it is, for errors."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds {str(document)[:60]!r}; expected an object")
    return document
