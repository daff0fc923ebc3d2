"""Saves a quantized model as safetensors with a compressed-tensors `quantization_config`, which
transformers, vLLM and SGLang load. Weights without codes are saved unchanged, or as `storage` says.

Codes may be given by the checkpoint's names (`model.layers.0.self_attn.q_proj.weight`) or by the
model's own (`layers.0.attn.qkv`): fused ones are split into the pieces their family names.

    save_quantized(model, Path("out"), source="demo", matrices={"layers.0.mlp.down": matrix})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import save_safetensors
from ridgeline.models.checkpoint.base import shorten
from ridgeline.models.checkpoint.save import MAX_SHARD_BYTES
from ridgeline.models.families import Description, WeightPart, parts
from ridgeline.quantization.export import describe_source, hf_config
from ridgeline.quantization.files.compressed import format_of, layer_tensors, scheme_config
from ridgeline.quantization.files.matrix import StoredMatrix, cut
from ridgeline.quantization.files.plain import PlainStorage
from ridgeline.quantization.scheme import Codes, Scheme


@dataclass(frozen=True)
class KVScales:
    """Fixed scales of cached keys and values: one a layer, or one for each of its heads."""

    dtype: torch.dtype  # int8 or fp8
    keys: Tensor  # [layers] or [layers, key-value heads]
    values: Tensor


@dataclass(frozen=True)
class SparsityPattern:
    """The pattern of zeros among the weights; they are stored like all other weights."""

    structure: Literal["2:4", "unstructured"]
    share: float  # of the weights that are zero, 0 to 1
    layers: tuple[str, ...] = ()  # empty: all linear ones


def save_quantized(
    model: Transformer,
    folder: Path,
    *,
    source: str | Path | Description,
    matrices: Mapping[str, tuple[Codes, Scheme]],
    kv_scales: KVScales | None = None,
    sparsity: SparsityPattern | None = None,
    scale_dtype: torch.dtype = torch.float32,
    storage: PlainStorage | None = None,
    extra_files: Mapping[str, bytes | Path] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `folder`, new or empty. Scales are stored in fp32 by default, so that what is saved
    equals what was measured, bit for bit. `storage` has the dtypes of weights without codes (None:
    as they are in the model).
    """
    description = source if isinstance(source, Description) else describe_source(source)
    pieces = checkpoint_matrices(matrices, description)
    storage = storage or PlainStorage(torch.float32)  # never wider than the model's own dtype
    config = hf_config(model, description, storage.usual(model.embed.weight.dtype))
    if pieces or kv_scales is not None:
        config["quantization_config"] = quantization_config(
            {name: matrix.scheme for name, matrix in pieces.items()},
            description,
            kv_scales,
            sparsity,
        )
    elif sparsity is not None:
        config["sparsity_config"] = sparsity_config(sparsity)
    save_safetensors(
        folder,
        _tensors(model, description, pieces, kv_scales, scale_dtype, storage),
        config,
        max_shard_bytes=max_shard_bytes,
        extra_files=extra_files,
    )


def checkpoint_matrices(
    matrices: Mapping[str, tuple[Codes, Scheme]], description: Description
) -> dict[str, StoredMatrix]:
    """By the checkpoint's names, fused ones in pieces."""
    pieces, used = {}, set()
    for part in parts(description.config, description.family.hf_names):
        for key in (part.name, part.parameter, _layer(part.parameter)):
            if key in matrices and not part.name.endswith(".bias"):
                whole = StoredMatrix(*matrices[key])
                pieces[part.name] = whole if key == part.name else _piece(whole, part)
                used.add(key)
                break
    unknown = sorted(matrices.keys() - used)
    if unknown:
        raise UnsupportedError(
            f"there are codes for {shorten(unknown)}, which {description.family.name} does not have"
        )
    return pieces


def _piece(matrix: StoredMatrix, part: WeightPart) -> StoredMatrix:
    if not part.index:
        return matrix
    (rows,) = part.index
    assert isinstance(rows, slice), f"{part.name}: codes of experts go by the checkpoint's names"
    return cut(matrix, rows)


def quantization_config(
    schemes: Mapping[str, Scheme],
    description: Description,
    kv_scales: KVScales | None = None,
    sparsity: SparsityPattern | None = None,
) -> dict[str, Any]:
    """What config.json says, with `schemes` by the checkpoint's names of weights."""
    ignore = [name for name in linear_layers(description) if f"{name}.weight" not in schemes]
    layers: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        layers.setdefault(scheme, []).append(name.removesuffix(".weight"))
    one = len(layers) == 1
    groups = {
        f"group_{number}": {"targets": ["Linear"] if one else names} | scheme_config(scheme)
        for number, (scheme, names) in enumerate(layers.items())
    }
    formats = {format_of(scheme) for scheme in layers}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": _whole_format(formats),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None if kv_scales is None else _kv_config(kv_scales),
    }
    if sparsity is not None:
        config["sparsity_config"] = sparsity_config(sparsity)
    return config


def _whole_format(formats: set[str]) -> str:
    if not formats:
        return "dense"
    return next(iter(formats)) if len(formats) == 1 else "mixed-precision"


def _kv_config(kv_scales: KVScales) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float" if kv_scales.dtype.is_floating_point else "int",
        "strategy": "attn_head" if kv_scales.keys.dim() == 2 else "tensor",
        "symmetric": True,
        "dynamic": False,
    }


def sparsity_config(sparsity: SparsityPattern) -> dict[str, Any]:
    return {
        "format": "dense",
        "sparsity_structure": sparsity.structure,
        "global_sparsity": sparsity.share,
        "targets": list(sparsity.layers) or ["Linear"],
        "ignore": [],
    }


def linear_layers(description: Description) -> list[str]:
    """Names of the layers that `Linear` matches; the head is one even where it is tied."""
    names = description.family.hf_names
    layers = [
        _layer(part.name)
        for part in parts(description.config, names)
        if part.name.endswith(".weight")
        and "norm" not in part.parameter
        and part.parameter != "embed.weight"
    ]
    head = _layer(names.head)
    return layers if head in layers else [*layers, head]


def _layer(weight: str) -> str:
    return weight.removesuffix(".weight")


def _tensors(
    model: Transformer,
    description: Description,
    pieces: Mapping[str, StoredMatrix],
    kv_scales: KVScales | None,
    scale_dtype: torch.dtype,
    storage: PlainStorage,
) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    names = description.family.hf_names
    for part in parts(description.config, names):
        if part.name in pieces:
            yield from layer_tensors(_layer(part.name), pieces[part.name], scale_dtype)
        else:
            value = parameters[part.parameter]
            dtype = storage.of(part.parameter, value)
            yield part.name, value[part.index].to(dtype).contiguous()
    for i in range(description.config.num_layers if kv_scales is not None else 0):
        assert kv_scales is not None
        attention = names.out.replace("{i}", str(i)).rsplit(".", 2)[0]
        yield f"{attention}.k_scale", _kv_scale(kv_scales.keys[i])
        yield f"{attention}.v_scale", _kv_scale(kv_scales.values[i])


def _kv_scale(scale: Tensor) -> Tensor:
    """One number, or [heads, 1, 1]."""
    return scale.float().view(1) if scale.dim() == 0 else scale.float().view(-1, 1, 1)
