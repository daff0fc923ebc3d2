"""Writes a checkpoint that Hugging Face libraries load: safetensors shards, index, config.json.

Everything goes into a folder beside the target, which takes the target's name in one rename at the
end: a full disk or Ctrl-C leaves nothing behind. Host memory holds one shard at a time.

    save_safetensors(Path("out"), model.state_dict().items(), config)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ridgeline.errors import OutputError, RidgelineError
from ridgeline.models.checkpoint.safetensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME

MAX_SHARD_BYTES = 5 << 30  # as Hugging Face does
METADATA = {"format": "pt"}  # transformers asks for it
ShardTensors = dict[str, torch.Tensor]


def save_safetensors(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Mapping[str, bytes | Path] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `folder`, which must be new or empty; a tensor above the limit gets its own shard.

    `tensors` may be a generator and may hold tensors of any device; `extra_files` maps names to
    contents or to files that are copied; `metadata` goes into each shard's header.
    """
    folder = Path(folder).resolve()
    with folder_beside(folder) as beside:
        sizes = write_shards(beside, tensors, max_shard_bytes, dict(metadata or METADATA))
        name_shards(beside, sizes)
        write_description(beside, config, extra_files or {})


def write_description(
    folder: Path, config: Mapping[str, Any], extra_files: Mapping[str, bytes | Path]
) -> None:
    """What lies beside the weights."""
    write_file(folder / CONFIG_NAME, as_json(config))
    for name, content in extra_files.items():
        assert Path(name).name == name, f"{name} is not a plain file name"
        assert not (folder / name).exists(), f"{name} is written already"
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
            sync(folder / name)
        else:
            write_file(folder / name, content)


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` when the block ends well, and vanishes otherwise."""
    check_target(target)
    beside = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            beside.mkdir()
            yield beside
            sync(beside)
            beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """What the system refuses, as an OutputError."""
    try:
        yield
    except RidgelineError:  # some are OSErrors too; where the tensors come from may raise them
        raise
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise OutputError(f"cannot write {target}: {reason or error}") from error


def check_target(target: Path) -> None:
    if target.is_dir():
        if any(target.iterdir()):
            raise OutputError(f"{target} already exists and is not empty; give another folder")
    elif target.exists():
        raise OutputError(f"{target} is a file; give a folder to write to")


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int,
    metadata: dict[str, str],
) -> list[dict[str, int]]:
    """Write numbered shards and return, for each, its tensors' bytes by name."""
    sizes: list[dict[str, int]] = []
    names: set[str] = set()
    for number, shard in enumerate(split(tensors, max_shard_bytes)):
        repeated = names & shard.keys()
        assert not repeated, f"tensors named twice: {sorted(repeated)}"
        names |= shard.keys()
        write_shard(folder / str(number), shard, metadata)
        sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard.clear()  # the generator behind still holds the dictionary
    return sizes


def write_shard(file: Path, shard: ShardTensors, metadata: dict[str, str]) -> None:
    file.touch()
    mode = file.stat().st_mode  # as of other files: safetensors lets the owner alone read
    save_file(shard, file, metadata=metadata)
    file.chmod(mode)
    sync(file)


def split(
    tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[ShardTensors]:
    """Shards of contiguous CPU tensors, in the order given; at least one, which may be empty."""
    shard: ShardTensors = {}
    storages: set[int] = set()
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, storages, shard_bytes = {}, set(), 0
        assert name not in shard, f"tensor named twice: {name}"
        shard[name] = own_memory(tensor, storages)
        shard_bytes += tensor.nbytes
    yield shard


def own_memory(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """The tensor as safetensors wants it: dense, on the CPU, sharing memory with no other."""
    host = tensor.detach().cpu().contiguous()
    if host.untyped_storage().data_ptr() in storages:
        host = host.clone()
    storages.add(host.untyped_storage().data_ptr())
    return host


def name_shards(folder: Path, sizes: list[dict[str, int]]) -> None:
    """Give the numbered shards the names Hugging Face expects, and write the index for several."""
    if len(sizes) == 1:
        (folder / "0").rename(folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(sizes):
        file = shard_name("model", number, len(sizes))
        (folder / str(number)).rename(folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    total_bytes = sum(sum(shard.values()) for shard in sizes)
    write_index(folder / INDEX_NAME, weight_map, total_bytes)


def shard_name(stem: str, number: int, count: int) -> str:
    """Of several files, the first of which has the number 0."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_file(path, as_json(index))


def as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that the rename cannot come before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
