"""Reads quantized checkpoints of other tools, without expanding matrices that match one of our
schemes: AutoAWQ, GPTQ, compressed-tensors, fp8 (DeepSeek's, vLLM's, fbgemm's), modelopt, and GGUF's
Q4_0.

`read_quantized` yields codes where a scheme matches and tensors for the rest; `decoded` is the same
checkpoint with plain weights, which loads like any other.

    for name, weight in read_quantized(open_checkpoint(path)): ...   # a StoredMatrix or a tensor
    load_weights(model, decoded(open_checkpoint(path)), description)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from ridgeline.errors import CheckpointError, ConfigError, UnsupportedError, near_matches
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.checkpoint.base import TensorInfo, shorten
from ridgeline.models.checkpoint.safetensors import read_json_object
from ridgeline.progress import Progress
from ridgeline.quantization.files import gguf
from ridgeline.quantization.files.compressed import compressed_layout
from ridgeline.quantization.files.gptq_awq import awq_layout, gptq_layout
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.files.quantized import Decoded, QuantizedCheckpoint
from ridgeline.quantization.files.scaled import fp8_layout, modelopt_layout
from ridgeline.quantization.files.stored import StoredModule

log = logging.getLogger(__name__)

METHODS = {
    "awq": awq_layout,
    "gptq": gptq_layout,
    "fp8": fp8_layout,
    "fbgemm_fp8": fp8_layout,
    "modelopt": modelopt_layout,
}
COMPRESSED = "compressed-tensors"
MODELOPT_FILE = "hf_quant_config.json"  # where older versions of modelopt keep their config


def quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The config that says how a checkpoint is quantized; None for a plain one."""
    if checkpoint.format != "safetensors":
        return None
    values = checkpoint.metadata
    text = values.get("text_config")
    config = values.get("quantization_config") or values.get("compression_config")
    if config is None and isinstance(text, Mapping):
        config = text.get("quantization_config")
    if config is None and (checkpoint.path / MODELOPT_FILE).is_file():
        read_json_object(checkpoint.path / MODELOPT_FILE, ConfigError)
        config = {"quant_method": "modelopt"}  # its tensors say the rest
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{checkpoint.path}/config.json: quantization_config is not an object")
    return config


def kv_dtype(checkpoint: Checkpoint) -> Literal["fp8", "int8"] | None:
    """The dtype a checkpoint asks for its KV cache; None where it does not say."""
    config = quantization_config(checkpoint) or {}
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return None
    kinds: dict[Any, Literal["fp8", "int8"]] = {"float": "fp8", "int": "int8"}
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8:
        raise UnsupportedError(
            f"{checkpoint.path}: kv_cache_scheme is {str(scheme)[:80]}; supported: 8 bits, float "
            "or int; give --kv-dtype to choose another"
        )
    if scheme.get("type") not in kinds:
        raise ConfigError(f"{checkpoint.path}: kv_cache_scheme has type {scheme.get('type')!r}")
    return kinds[scheme["type"]]


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether it is quantized (GGUF block types do not count)."""
    return quantization_config(checkpoint) is not None


def open_quantized(checkpoint: Checkpoint) -> QuantizedCheckpoint | None:
    """None for a plain checkpoint; an error where a header does not fit its format."""
    config = quantization_config(checkpoint)
    if config is None:
        return None
    method, known = str(config.get("quant_method")), [COMPRESSED, *METHODS]
    if method not in known:
        hint = near_matches(method, known)
        raise UnsupportedError(
            f"{checkpoint.path} is quantized by {method!r}; supported are {', '.join(known)}{hint}"
        )
    modules = _modules(checkpoint)
    if method == COMPRESSED:
        shapes = _shapes(checkpoint)
        layouts = [compressed_layout(module, config, shapes.get(module.name)) for module in modules]
    else:
        layouts = [METHODS[method](module, config) for module in modules]
    return QuantizedCheckpoint(checkpoint, [layout for layout in layouts if layout is not None])


def read_quantized(
    checkpoint: Checkpoint,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
    blocks: Collection[str] = (),
) -> Iterator[tuple[str, StoredMatrix | Tensor]]:
    """Every tensor of the model under its plain name: a StoredMatrix where codes can be kept.
    `blocks` names those of a GGUF file that are wanted in its own blocks.
    """
    if checkpoint.format == "gguf":
        yield from _read_gguf(checkpoint, names, progress, blocks)
        return
    yield from (open_quantized(checkpoint) or QuantizedCheckpoint(checkpoint, [])).read(
        names, progress
    )


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain weights; itself where it has them already."""
    quantized = open_quantized(checkpoint)
    if quantized is None:
        return checkpoint
    for note in quantized.notes():
        log.warning("%s: %s", checkpoint.path.name, note)
    return Decoded(quantized)


def _modules(checkpoint: Checkpoint) -> list[StoredModule]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        layer, _, last = name.rpartition(".")
        modules.setdefault(layer, {})[last] = info
    return [StoredModule(layer, infos) for layer, infos in modules.items()]


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """The contents of `weight_shape` tensors, two numbers each, read before everything else."""
    names = [name for name in checkpoint.tensors if name.endswith(".weight_shape")]
    wrong = [name for name in names if checkpoint.tensors[name].num_elements != 2]
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: expected two numbers in {shorten(wrong)}")
    shapes = {}
    for name, tensor in checkpoint.read(names):
        num_outputs, depth = (int(size) for size in tensor.flatten())
        if min(num_outputs, depth) < 1:
            raise CheckpointError(f"{checkpoint.path}: {name} holds {[num_outputs, depth]}")
        shapes[name.removesuffix(".weight_shape")] = (num_outputs, depth)
    return shapes


def _read_gguf(
    checkpoint: Checkpoint,
    names: Collection[str] | None,
    progress: Progress | None,
    blocks: Collection[str],
) -> Iterator[tuple[str, StoredMatrix | Tensor]]:
    """In the order of the file, so that the pieces of a layer come together."""
    infos = [info for name, info in checkpoint.tensors.items() if names is None or name in names]
    total_bytes, done_bytes = sum(info.stored_bytes for info in infos), 0
    for info in infos:
        if info.name in blocks:
            yield info.name, gguf.read_blocks(checkpoint, info.name)
        elif gguf.keeps_codes(info):
            yield info.name, gguf.read_matrix(checkpoint, info.name)
        else:
            yield from checkpoint.read([info.name])
        done_bytes += info.stored_bytes
        if progress is not None:
            progress(f"reading {info.file.name}", done_bytes, total_bytes)
