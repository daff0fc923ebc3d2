"""Writes tiny checkpoints in the formats of other quantizers, element by element from their public
layouts, and returns the weights that were written. Nothing here comes from the package under test.

A matrix has O outputs and D columns; every writer takes the plain weight [O, D] and returns the
tensors stored for it and the fp32 weight these stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[str, Tensor], Written]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands in nibble 0, 1, 2 … of a word


def write_checkpoint(folder: Path, name: str, writer: Writer, config: dict[str, Any]) -> Any:
    """The tiny model of this name with its linear layers as `writer` stores them; returned with the
    weights they stand for.
    """
    peer = tiny_models.save_model(name, folder)
    tensors = load_file(folder / "model.safetensors")
    state = peer.state_dict()
    for key in list(tensors):
        if "_proj.weight" in key:
            layer = key.removesuffix(".weight")
            stored, weight = writer(layer, tensors.pop(key))
            tensors |= {f"{layer}.{last}": tensor.contiguous() for last, tensor in stored.items()}
            state[key] = weight
    peer.load_state_dict(state)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return peer


def in_words(nibbles: np.ndarray, bits: int = 4) -> Tensor:
    """Rows of codes as int32 words, the first code in the lowest bits."""
    per_word = 32 // bits
    rows, count = nibbles.shape
    words = np.zeros((rows, count // per_word), np.uint32)
    for column in range(count):
        place = np.uint32(bits * (column % per_word))
        words[:, column // per_word] |= nibbles[:, column].astype(np.uint32) << place
    return torch.from_numpy(words.view(np.int32))


def affine(weight: Tensor, group: int, bits: int = 4, symmetric: bool = False) -> Any:
    """Codes [O, D], fp16 scales [O, G] and whole zero points [O, G] that are not all alike."""
    top = 2**bits - 1
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=-1e-3), parts.amax(-1).clamp(min=1e-3)
    scale = ((high - low) / top).half()
    zero = (-low / scale.float()).round().clamp(1, top)
    if symmetric:
        scale = (torch.maximum(high, -low) / (top / 2)).half()
        zero = torch.full_like(zero, (top + 1) / 2)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    back = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.flatten(1).int(), scale, zero.int(), back.flatten(1)


def awq_writer(group: int) -> Writer:
    def write(layer: str, weight: Tensor) -> Written:
        codes, scale, zero, back = affine(weight, group)
        tensors = {"qweight": awq_words(codes.t().numpy()), "qzeros": awq_words(zero.t().numpy())}
        return tensors | {"scales": scale.t()}, back

    return write


def awq_words(codes: np.ndarray) -> Tensor:
    shuffled = codes.copy()
    for start in range(0, codes.shape[1], 8):
        for nibble, output in enumerate(AWQ_ORDER):
            shuffled[:, start + nibble] = codes[:, start + output]
    return in_words(shuffled)


def gptq_writer(
    group: int, *, bits: int = 4, offset: int = 1, symmetric: bool = False, sort: bool = False
) -> Writer:
    """`offset` is taken off each zero point; `sort` groups the columns in a random order."""

    def write(layer: str, weight: Tensor) -> Written:
        depth = weight.shape[1]
        order = torch.randperm(depth, generator=torch.Generator().manual_seed(3))
        order = order if sort else torch.arange(depth)
        codes, scale, zero, back = affine(weight[:, order], group, bits, symmetric)
        place = torch.argsort(order)  # column d of the weight is column place[d] of the sorted one
        stored = {
            "qweight": in_words(codes[:, place].numpy(), bits).t(),
            "qzeros": in_words((zero - offset).t().numpy(), bits),
            "scales": scale.t(),
            "g_idx": (place // group).int(),
        }
        return stored, back[:, place]

    return write


def packed_writer(group: int, sort: bool = False) -> Writer:
    """compressed-tensors' pack-quantized with zero points; `sort` as for GPTQ."""
    gptq = gptq_writer(group, offset=0, sort=sort)

    def write(layer: str, weight: Tensor) -> Written:
        stored, back = gptq(layer, weight)
        tensors = {
            "weight_packed": stored["qweight"].t(),
            "weight_scale": stored["scales"].t(),
            "weight_zero_point": stored["qzeros"].t(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors | ({"weight_g_idx": stored["g_idx"]} if sort else {}), back

    return write


def fp8_writer(part: tuple[int, int] | None, scale_name: str, fixed_inputs: bool = False) -> Writer:
    """Scales for blocks of this size, the last ones smaller; None: one for the whole matrix."""

    def write(layer: str, weight: Tensor) -> Written:
        rows, columns = part or tuple(weight.shape)
        scale = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        back = torch.zeros_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[block].abs().max() / 448
                codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
                back[block] = codes[block].float() * scale[i, j]
        stored = {"weight": codes, scale_name: scale if part else scale.view(())}
        return stored | ({"input_scale": torch.tensor(0.02)} if fixed_inputs else {}), back

    return write


def fp4_bytes(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest 4-bit floats two to a byte, the first in the low half, and their values."""
    table = torch.tensor(FP4)
    places = (scaled.abs().clamp(max=6.0)[..., None] - table).abs().argmin(-1)
    codes = (places + 8 * (scaled < 0)).to(torch.uint8)
    values = table[places] * torch.where(scaled < 0, -1.0, 1.0)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), values


def nvfp4_writer(packed: str, over_all: str, divided: bool) -> Writer:
    def write(layer: str, weight: Tensor) -> Written:
        parts = weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (6 * 448)
        scale = (parts.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        by_group = (scale.float() * whole)[..., None].clamp(min=1e-9)
        stored, values = fp4_bytes((parts / by_group).flatten(1))
        back = values.unflatten(1, (-1, 16)) * (scale.float() * whole)[..., None]
        one = (1 / whole if divided else whole).view(1)
        return {packed: stored, "weight_scale": scale, over_all: one}, back.flatten(1)

    return write


def mxfp4_writer(layer: str, weight: Tensor) -> Written:
    parts = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
    scale = 2.0 ** exponent[..., None]
    stored, values = fp4_bytes((parts / scale).flatten(1))
    back = values.unflatten(1, (-1, 32)) * scale
    packed = {"weight_packed": stored, "weight_scale": (exponent + 127).to(torch.uint8)}
    return packed, back.flatten(1)


def compressed_config(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
