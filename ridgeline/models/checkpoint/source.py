"""From the MODEL a user names to a path on this machine: a folder, a GGUF file, a hub name, `demo`.

Owns where weights come from and the error when they cannot be fetched. `open_checkpoint` reads the
files; `demo.py` fetches the demo.

    resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct@main")  # a folder in the hub's cache
    resolve_model("org/name:model.Q4_K_M.gguf")                # one file of a hub repository
"""

from __future__ import annotations

import errno
import io
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ridgeline.errors import (
    CheckpointError,
    MissingPackageError,
    ModelNotFoundError,
    OfflineError,
    OutputError,
)
from ridgeline.models.checkpoint.demo import fetch_demo
from ridgeline.progress import Progress

DEMO = "demo"
HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<file>[^:@]+\.gguf))?(@(?P<revision>[^:@]+))?"
)
# Weights, configuration and tokenizer; no pickle, and no second copy of the weights (some
# repositories keep one in a subfolder, Mistral's as consolidated.safetensors).
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.*"]
HUB_LEFT_OUT = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth"]
ALLOWED = "give a Hugging Face folder, a GGUF file, a hub name like org/name, or demo"


def resolve_model(name: str, *, progress: Progress | None = None) -> Path:
    """The local path of a model, fetched first when it is `demo` or a hub name.

    `demo` is always the demo; a folder of that name is `./demo`.
    """
    if name == DEMO:
        return fetch_demo(progress)
    path = local_path(name)
    if name and exists(path):
        return path
    match = HUB_NAME.fullmatch(name)
    if match is None or (match["file"] is None and path.suffix in (".safetensors", ".gguf")):
        raise ModelNotFoundError(f"{quote(name)} is not a local path; {ALLOWED}{near(path)}")
    return fetch_from_hub(name, match["repository"], match["file"], match["revision"], progress)


def local_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~someone, an unknown user
        return Path(name)


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte
        return False


def near(path: Path) -> str:
    """`; did you mean ...?` from what lies beside the path, or nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except (OSError, ValueError):
        names = []
    if path.parent == Path():
        names.append(DEMO)
    close = [str(path.with_name(match)) for match in get_close_matches(path.name, names, n=3)]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def fetch_from_hub(
    name: str,
    repository: str,
    file: str | None,
    revision: str | None,
    progress: Progress | None = None,
) -> Path:
    """The repository's folder in the hub's cache, or one file of it."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingPackageError(
            f"{name!r} is not a local path, and hub names need: pip install huggingface_hub"
        ) from error
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=HUB_FILES if file is None else [file],
                ignore_patterns=HUB_LEFT_OUT if file is None else None,
                tqdm_class=hub_bar(f"fetching {repository}", progress),
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repository} is gated: accept its terms on the hub, then run: hf auth login"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise offline(name, error) from error
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.EntryNotFoundError,
        errors.HFValidationError,
    ) as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a local path nor on the hub ({first_line(error)}); "
            f"{ALLOWED}{near(Path(name))}"
        ) from error
    except (OSError, getattr(errors, "HTTPError", OSError)) as error:  # httpx's, since hub 1.0
        raise offline(name, error) from error
    return check_fetched(folder, repository, file)


def hub_bar(label: str, progress: Progress | None) -> Any:
    """The hub's own kind of progress bar, which draws nothing and reports its bytes instead."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class DownloadBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"file": io.StringIO(), "leave": False}))

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if progress is not None and self.unit == "B" and self.total:
                progress(label, int(self.n), int(self.total))
            return True

    return DownloadBar


def check_fetched(folder: Path, repository: str, file: str | None) -> Path:
    if file is not None:
        if not (folder / file).is_file():
            raise ModelNotFoundError(f"{repository} on the hub has no file {file}")
        return folder / file
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{repository} has no .safetensors on the hub; for a GGUF give {repository}:FILE.gguf"
        )
    return folder


def offline(name: str, error: Exception) -> OfflineError | OutputError:
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return OutputError(f"{name!r} could not be written to the hub's cache: {cause}")
    return OfflineError(
        f"{name!r} is not a local path, and the hub could not be reached ({first_line(cause)}); "
        f"download it on a machine with network access and give its folder{near(Path(name))}"
    )


def first_line(error: BaseException) -> str:
    """What went wrong, without the advice that the hub's messages add."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def quote(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "…")
