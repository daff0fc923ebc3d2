"""The compressed-tensors format, matrix by matrix: its tensors, for reading and writing, and how a
`quantization_config` says how each layer is stored.

| format | tensors of a layer |
|---|---|
| pack-quantized | `weight_packed`: unsigned codes in int32 words along each row; `weight_scale`; `weight_shape`; where asymmetric `weight_zero_point`: words down the outputs; in older ones `weight_g_idx`: each column's group |
| int-quantized | `weight` int8, `weight_scale` |
| float-quantized | `weight` e4m3, `weight_scale` [O, 1], [1] or one for each block |
| nvfp4-pack-quantized, mxfp4-pack-quantized | read only: scaled.py |

A config group applies to layers by name, by `re:` and a pattern, or by the class `Linear`, the most
specific first; `ignore` lists layers that are not quantized.

    for name, tensor in layer_tensors("model.layers.0.mlp.down_proj", matrix): ...
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.formats.packing import ZERO
from ridgeline.formats.words import pack_words, unpack_words
from ridgeline.quantization.files import scaled
from ridgeline.quantization.files.gptq_awq import (
    SCALES,
    SORTED,
    by_columns,
    grouped,
    in_order,
    likely_scheme,
    why_expanded,
)
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.files.stored import (
    FP8_NAME,
    MatrixLayout,
    StoredModule,
    Tensors,
    finite_scale,
)
from ridgeline.quantization.scheme import BLOCK, Scheme


def format_of(scheme: Scheme) -> str:
    if scheme.weight == "fp8":
        return "float-quantized"
    return "int-quantized" if scheme.inputs == "int8" else "pack-quantized"


def layer_tensors(
    layer: str, matrix: StoredMatrix, scale_dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a file has for one layer. Scales are rounded to `scale_dtype`."""
    (values, grid), scheme = matrix
    scale = grid.scale.to(scale_dtype)
    if format_of(scheme) == "pack-quantized":
        codes = values if scheme.weight == "int4" else values.to(torch.int16) + ZERO[8]
        yield f"{layer}.weight_packed", pack_words(codes, scheme.bits)
        yield f"{layer}.weight_shape", torch.tensor(values.shape)
        if grid.zero is not None:
            words = pack_words(grid.zero.t(), scheme.bits)
            yield f"{layer}.weight_zero_point", words.t().contiguous()
    else:
        yield f"{layer}.weight", values
    yield f"{layer}.weight_scale", scale.view(1) if scheme.spread == "tensor" else scale


def scheme_config(scheme: Scheme) -> dict[str, Any]:
    """The config group of a scheme, without its targets."""
    weights = _numbers(scheme.bits, "float" if scheme.weight == "fp8" else "int")
    weights |= {"symmetric": scheme.symmetric, "dynamic": False}
    weights |= {"strategy": "channel" if scheme.spread == "row" else scheme.spread}
    if scheme.spread == "group":
        weights["group_size"] = scheme.group
    if scheme.spread == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    inputs = None
    if scheme.inputs != "16-bit":
        inputs = _numbers(8, "float" if scheme.inputs == "fp8" else "int")
        inputs |= {"symmetric": True, "dynamic": True}
        inputs |= {"strategy": "group" if scheme.spread == "block" else "token"}
        if scheme.spread == "block":
            inputs["group_size"] = BLOCK
    return {
        "format": format_of(scheme),
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _numbers(bits: int, kind: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind}


def compressed_layout(
    module: StoredModule, config: Mapping[str, Any], shape: tuple[int, int] | None
) -> MatrixLayout | None:
    """`shape` is the content of the layer's `weight_shape`, where it has one."""
    if module.dtype("weight_packed") == "int32":
        return packed_layout(module, config_group(config, module.name), shape)
    if "weight_packed" in module:
        if "weight_global_scale" in module or module.dtype("weight_scale") == FP8_NAME:
            return scaled.nvfp4_matrix(module, "weight_packed", "weight_global_scale", divided=True)
        return scaled.mxfp4_matrix(module, "weight_packed")
    if module.dtype("weight") in ("int8", FP8_NAME):
        group = config_group(config, module.name)
        weights = weights_of(group, module)
        inputs_scaled = group.get("input_activations") is not None
        if module.dtype("weight") == "int8":
            zeros = not weights.get("symmetric", True)
            return scaled.int8_matrix(module, inputs_scaled, zeros)
        if weights.get("block_structure") not in (None, [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            module.wrong(
                f"has blocks of {weights['block_structure']}; only {BLOCK} x {BLOCK} are supported"
            )
        return scaled.fp8_matrix(module, "weight_scale", inputs_scaled)
    return None


def weights_of(group: Mapping[str, Any], module: StoredModule) -> Mapping[str, Any]:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        module.wrong("is stored quantized, but its config group does not describe weights")
    return weights


def packed_layout(
    module: StoredModule, group: Mapping[str, Any], shape: tuple[int, int] | None
) -> MatrixLayout:
    weights = weights_of(group, module)
    bits = weights.get("num_bits")
    if bits not in list(ZERO):
        module.wrong(f"has packed codes of {bits} bits; supported are 2, 4 and 8")
    if shape is None:
        module.wrong("has no weight_shape, which its packed weight needs")
    num_outputs, depth = shape
    per_word = 32 // bits
    module.expects("weight_packed", (num_outputs, -(-depth // per_word)))
    _, num_groups = module.matrix_shape("weight_scale", *SCALES)
    module.expects("weight_scale", (num_outputs, num_groups))
    module.groups("weight_scale", depth, num_groups)
    zeros = not weights.get("symmetric", True)
    if zeros:
        module.matrix_shape("weight_zero_point", "int32")
        module.expects("weight_zero_point", (-(-num_outputs // per_word), num_groups))
    if "weight_g_idx" in module:
        module.needs("weight_g_idx", "int32", "int64")
        module.expects("weight_g_idx", (depth,))

    def make(tensors: Tensors) -> StoredMatrix | Tensor:
        codes_OD = unpack_words(tensors["weight_packed"], bits, depth)
        scale_OG = finite_scale(tensors["weight_scale"], module.name)
        if zeros:
            words_GW = tensors["weight_zero_point"].t()
            zero_OG = unpack_words(words_GW, bits, num_outputs).t().contiguous()
        else:
            zero_OG = torch.full(scale_OG.shape, ZERO[bits])
        group_of = tensors.get("weight_g_idx")
        unused = group_of is None or bool((group_of == -1).all())
        if group_of is not None and not unused and not in_order(group_of, num_groups, module.name):
            return by_columns(codes_OD, scale_OG, zero_OG, group_of)
        return grouped(codes_OD.contiguous(), scale_OG, zero_OG, bits)

    names = ["weight_packed", "weight_scale", "weight_g_idx"]
    names += ["weight_zero_point"] if zeros else []
    reason = why_expanded(bits, depth, num_groups)
    if weights.get("actorder") in ("group", "dynamic", True) and "weight_g_idx" in module:
        reason = SORTED
    scheme = likely_scheme(bits, depth, num_groups, symmetric=not zeros)
    return module.layout(shape, names, make, reason, scheme)


def config_group(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The group that applies to a layer: by its name, by a pattern, or as a `Linear`."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config has no config_groups")
    matches: list[tuple[int, Mapping[str, Any]]] = []
    for group in groups.values():
        targets = group.get("targets", []) if isinstance(group, Mapping) else None
        if not isinstance(targets, list):
            raise CheckpointError("quantization_config has a config group that lists no targets")
        matches += [(rank, group) for target in targets if (rank := _rank(str(target), layer)) >= 0]
    if not matches:
        raise CheckpointError(f"{layer} is stored quantized, but no config group applies to it")
    return min(matches, key=lambda one: one[0])[1]


def _rank(target: str, layer: str) -> int:
    """How specific a match is: 0 a name, 1 a pattern, 2 a class; -1: none."""
    if target == layer:
        return 0
    if target.startswith("re:"):
        try:
            return 1 if re.match(target.removeprefix("re:"), layer) else -1
        except re.error as error:
            raise CheckpointError(f"quantization_config: pattern {target!r}: {error}") from error
    return 2 if target == "Linear" else -1
