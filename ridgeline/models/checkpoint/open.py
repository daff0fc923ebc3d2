"""Finds out what a path holds, by its first bytes rather than its name, and opens it.

open_checkpoint(Path("model.gguf"))                # GGUF
open_checkpoint(Path("SmolLM2-135M-Instruct"))     # a folder with config.json and safetensors
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.errors import CheckpointError, ModelNotFoundError
from ridgeline.models.checkpoint.base import Checkpoint, shorten
from ridgeline.models.checkpoint.gguf import GgufCheckpoint, part_paths
from ridgeline.models.checkpoint.gguf_header import MAGIC
from ridgeline.models.checkpoint.safetensors import INDEX_NAME, SafetensorsCheckpoint

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
CONVERT = (
    "pickle can run code and is refused; convert it where you trust it: python -c "
    '"from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('FOLDER').save_pretrained('OUT')\""
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Parse and check a checkpoint's headers; tensor data is read by `Checkpoint.read`."""
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a model: it is neither a file nor a folder")
    return open_file(path)


def open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    if any(name == INDEX_NAME or name.endswith(".safetensors") for name in names):
        return SafetensorsCheckpoint.open(folder)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return GgufCheckpoint.open(only_gguf(folder, ggufs))
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(f"{folder} holds only {shorten(pickles)}: {CONVERT}")
    raise CheckpointError(
        f"{folder} is not a model: it holds no .safetensors and no .gguf file{_below(folder)}"
    )


def _below(folder: Path) -> str:
    """Where there is a model nonetheless: the run of a training has its checkpoints below it."""
    for pattern in ("*/*.safetensors", "*/*/*.safetensors"):
        folders = sorted({file.parent for file in folder.glob(pattern)})
        if folders:
            return f"; give the one below it, {folders[-1]}"
    return ""


def only_gguf(folder: Path, names: list[str]) -> Path:
    """The folder's one GGUF model, which may be split into parts."""
    parts = part_paths(folder / names[0])
    if any(folder / name not in parts for name in names):
        raise CheckpointError(f"{folder} holds several GGUF files; name one of {shorten(names)}")
    return folder / names[0]


def open_file(path: Path) -> Checkpoint:
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start.startswith(MAGIC):
        return GgufCheckpoint.open(path)
    if start.startswith(PICKLE_MAGICS):
        raise CheckpointError(f"{path} is a pickle: {CONVERT}")
    if start[8:9] == b"{" or path.name == INDEX_NAME:
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder, {path.parent}")
    raise CheckpointError(
        f"{path} is not a model: give a GGUF file, or a folder with config.json and .safetensors"
    )
