"""Hugging Face folders: `config.json` and one or more safetensors files, streamed by mmap.

The safetensors library reads tensors; this file finds the shards, compares them with the index, and
turns every defect into one line that names the file. Tensors are views of the mapped shard.

    checkpoint = SafetensorsCheckpoint.open(Path("SmolLM2-135M-Instruct"))
    checkpoint.tensors["model.embed_tokens.weight"].dtype  # "bf16"
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.errors import CheckpointError, ConfigError, UnsupportedError
from ridgeline.formats.dtypes import dtype_bytes, dtype_name, from_safetensors
from ridgeline.models.checkpoint.base import Checkpoint, TensorInfo, shorten

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


class SafetensorsCheckpoint(Checkpoint):
    format = "safetensors"

    @classmethod
    def open(cls, folder: Path) -> SafetensorsCheckpoint:
        index = folder / INDEX_NAME
        weight_map = read_weight_map(index) if index.is_file() else {}
        shards = sorted(set(weight_map.values())) or [find_single(folder).name]
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{index} lists files that are missing: {shorten(missing)}")
        metadata = read_config(folder)
        tensors = merge_shards([folder / name for name in shards])
        absent = weight_map.keys() - tensors.keys()
        if absent:
            raise CheckpointError(f"{index} lists tensors that no file contains: {shorten(absent)}")
        return cls(folder, metadata, tensors)

    def _read_file(
        self, file: Path, infos: list[TensorInfo]
    ) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
        with open_shard(file) as shard:
            for info in infos:
                yield info, read_tensor(shard, info)


def read_tensor(shard: Any, info: TensorInfo) -> torch.Tensor:
    try:
        tensor: torch.Tensor = shard.get_tensor(info.name)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{info.file}: tensor {info.name!r}: {error}") from error
    return tensor


def merge_shards(files: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        infos = read_shard_header(file)
        repeated = tensors.keys() & infos.keys()
        if repeated:
            raise CheckpointError(f"{file} repeats tensors of another file: {shorten(repeated)}")
        tensors.update(infos)
    return tensors


def read_shard_header(file: Path) -> dict[str, TensorInfo]:
    with open_shard(file) as shard:
        names = getattr(shard, "offset_keys", shard.keys)()  # by place in the file, where offered
        return {name: tensor_info(file, name, shard.get_slice(name)) for name in names}


def tensor_info(file: Path, name: str, header: Any) -> TensorInfo:
    code, shape = header.get_dtype(), tuple(header.get_shape())
    dtype = from_safetensors(code)
    if dtype is None:
        raise UnsupportedError(
            f"{file}: tensor {name!r} has the type {code}, which is not supported"
        )
    stored_bytes = math.prod(shape) * dtype_bytes(dtype)
    return TensorInfo(name, shape, dtype_name(dtype), file, stored_bytes)


def open_shard(file: Path) -> Any:
    """The library's handle on one file, a context manager; its header has been checked."""
    check_header_length(file)
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is corrupt or cut short: {error}") from error


def check_header_length(file: Path) -> None:
    """The commonest defects in words: a file cut short, a header that lies about its length."""
    try:
        with file.open("rb") as handle:
            start = handle.read(9)
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if start.startswith(b"version "):
        raise CheckpointError(f"{file} is a git-lfs pointer, not the weights; run: git lfs pull")
    if len(start) < 9:
        raise CheckpointError(f"{file} is cut short: it has {size} bytes and no header")
    (header_bytes,) = struct.unpack("<Q", start[:8])
    if header_bytes > size - 8:
        raise CheckpointError(
            f"{file} is corrupt or cut short: its header claims {header_bytes} bytes, "
            f"the file has {size}"
        )


def find_single(folder: Path) -> Path:
    """The one weights file of a folder without an index."""
    if (folder / SINGLE_NAME).is_file():
        return folder / SINGLE_NAME
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    raise CheckpointError(
        f"{folder} has {len(files)} .safetensors files and no {INDEX_NAME}: "
        f"{shorten([file.name for file in files])}"
    )


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name, all of them files of the index's own folder."""
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    outside = [str(file) for file in weight_map.values() if not is_plain_name(file)]
    if outside:
        raise CheckpointError(f"{index} lists files outside its folder: {shorten(set(outside))}")
    return weight_map


def is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def read_config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / CONFIG_NAME, ConfigError)


def read_json_object(
    file: Path, error_class: type[CheckpointError] | type[ConfigError]
) -> dict[str, Any]:
    """A JSON object from an untrusted file, or one line on why it is none."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise error_class(f"{file.parent} has no {file.name}") from error
    except OSError as error:
        raise error_class(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise error_class(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_class(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value
