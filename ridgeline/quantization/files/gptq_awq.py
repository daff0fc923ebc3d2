"""GPTQ and AutoAWQ checkpoints: 4-bit words in `qweight`, zero points in `qzeros`, fp16 scales in
`scales`, all with the depth along the rows, as a product x @ W reads it.

| | qweight | its words run | qzeros [G, O · bits / 32] |
|---|---|---|---|
| gptq | [D · bits / 32, O] | down the depth | less 1, unless `checkpoint_format` is gptq_v2 |
| awq (gemm) | [D, O / 8] | along the outputs, eights ordered 0 2 4 6 1 3 5 7 | as they are |

Some GPTQ tools name the older format and store the newer one: where a config says `sym` and all
zero points are the middle already, nothing is added.

GPTQ with `desc_act` sorts columns into groups by `g_idx`. Unless that is one group after the other,
our kernels do not support it, and the weights are expanded.

Letters: O outputs, D depth, G groups of the depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import CheckpointError, UnsupportedError
from ridgeline.formats.words import unpack_words
from ridgeline.quantization.files.matrix import StoredMatrix, expanded, int4_matrix, longest_group
from ridgeline.quantization.files.stored import (
    MatrixLayout,
    StoredModule,
    Tensors,
    field,
    finite_scale,
)
from ridgeline.quantization.scheme import GROUPS, Codes, Grid, parse_scheme

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where output 0, 1, 2 … of eight stands in its word
SORTED = "their columns are sorted into groups"
SCALES = ("fp16", "bf16", "fp32")


def gptq_layout(module: StoredModule, config: Mapping[str, Any]) -> MatrixLayout | None:
    if "qweight" not in module:
        return None
    bits = field(config, "bits", 4, 2, 4, 8)
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedError(
            f"GPTQ's checkpoint_format {form!r} is not supported; supported are gptq and gptq_v2"
        )
    offset = form == "gptq"
    num_outputs, depth, num_groups = gptq_sizes(module, bits)

    def make(tensors: Tensors) -> StoredMatrix | Tensor:
        codes_OD = unpack_words(tensors["qweight"].t(), bits, depth).contiguous()
        scale_OG = finite_scale(tensors["scales"], module.name).t().contiguous()
        zeros = unpack_words(tensors["qzeros"], bits, num_outputs).t().contiguous()
        zero_OG = zeros
        if offset and not (config.get("sym") and bool((zeros == 1 << bits - 1).all())):
            zero_OG = (zeros + 1) & ((1 << bits) - 1)
        group_of = tensors.get("g_idx")
        if group_of is not None and not in_order(group_of, num_groups, module.name):
            return by_columns(codes_OD, scale_OG, zero_OG, group_of)
        return grouped(codes_OD, scale_OG, zero_OG, bits)

    reason = why_expanded(bits, depth, num_groups)
    if "g_idx" in module and config.get("desc_act") and num_groups > 1:
        reason = SORTED
    names = ["qweight", "qzeros", "scales", "g_idx"]
    scheme = likely_scheme(bits, depth, num_groups, bool(config.get("sym")))
    return module.layout((num_outputs, depth), names, make, reason, scheme)


def gptq_sizes(module: StoredModule, bits: int) -> tuple[int, int, int]:
    """Outputs, depth and groups; an error unless all tensors agree on them."""
    rows, num_outputs = module.matrix_shape("qweight", "int32")
    depth, per_word = rows * 32 // bits, 32 // bits
    num_groups, _ = module.matrix_shape("scales", *SCALES)
    module.expects("scales", (num_groups, num_outputs))
    module.matrix_shape("qzeros", "int32")
    module.expects("qzeros", (num_groups, -(-num_outputs // per_word)))
    if "g_idx" in module:
        module.needs("g_idx", "int32", "int64")
        module.expects("g_idx", (depth,))
    else:
        module.groups("scales", depth, num_groups)
    return num_outputs, depth, num_groups


def why_expanded(bits: int, depth: int, num_groups: int) -> str:
    """Why codes match none of our schemes; empty where they match."""
    if bits == 4 and depth // num_groups % min(GROUPS):
        return f"4-bit groups of {depth // num_groups} are not one of our schemes"
    if bits == 8 and num_groups > 1:
        return "8-bit codes in groups are not one of our schemes"
    return "2-bit codes are not one of our schemes" if bits == 2 else ""


def likely_scheme(bits: int, depth: int, num_groups: int, symmetric: bool) -> str:
    """The scheme that `grouped` will give these codes, if zero points are as the config says."""
    if bits == 4:
        group = longest_group(depth // num_groups)
        return f"int4-g{group}{'' if symmetric else '-asym'}" if group else ""
    return "int8" if bits == 8 and num_groups == 1 and symmetric else ""


def in_order(group_of: Tensor, num_groups: int, name: str) -> bool:
    """Whether columns are grouped one group after the other, each as long as the next."""
    if int(group_of.min()) < 0 or int(group_of.max()) >= num_groups:
        raise CheckpointError(f"{name} has g_idx outside its {num_groups} groups")
    if len(group_of) % num_groups:
        return False
    plain = torch.arange(len(group_of)) // (len(group_of) // num_groups)
    return torch.equal(group_of.long(), plain)


def by_columns(codes_OD: Tensor, scale_OG: Tensor, zero_OG: Tensor, group_of: Tensor) -> Tensor:
    """The weights of codes whose columns each name their group."""
    columns = group_of.long()
    return (codes_OD.float() - zero_OG[:, columns].float()) * scale_OG[:, columns]


def grouped(
    codes_OD: Tensor, scale_OG: Tensor, zero_OG: Tensor, bits: int
) -> StoredMatrix | Tensor:
    """As one of our schemes where one matches, else as plain weights."""
    if bits == 4:
        matrix = int4_matrix(codes_OD, scale_OG, zero_OG)
        if matrix is not None:
            return matrix
    elif bits == 8 and scale_OG.shape[1] == 1 and bool((zero_OG == 128).all()):
        values = (codes_OD.to(torch.int16) - 128).to(torch.int8)
        return StoredMatrix(Codes(values, Grid(scale_OG)), parse_scheme("int8"))
    length = codes_OD.shape[1] // scale_OG.shape[1]
    return expanded(codes_OD, scale_OG, (1, length), zero_OG)


def awq_layout(module: StoredModule, config: Mapping[str, Any]) -> MatrixLayout | None:
    if "qweight" not in module:
        return None
    field(config, "bits", 4, 4)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedError(f"AWQ's version {version!r} is not supported; only gemm is")
    depth, words = module.matrix_shape("qweight", "int32")
    num_outputs = words * 8
    num_groups, _ = module.matrix_shape("scales", *SCALES)
    module.expects("scales", (num_groups, num_outputs))
    module.groups("scales", depth, num_groups)
    if "qzeros" in module or config.get("zero_point", True):
        module.matrix_shape("qzeros", "int32")
        module.expects("qzeros", (num_groups, words))

    def make(tensors: Tensors) -> StoredMatrix | Tensor:
        codes_OD = awq_codes(tensors["qweight"])
        scale_OG = finite_scale(tensors["scales"], module.name).t().contiguous()
        stored = tensors.get("qzeros")
        zero_OG = torch.full(scale_OG.shape, 8) if stored is None else awq_codes(stored)
        return grouped(codes_OD, scale_OG, zero_OG, 4)

    reason = why_expanded(4, depth, num_groups)
    scheme = likely_scheme(4, depth, num_groups, "qzeros" not in module)
    names = ["qweight", "qzeros", "scales"]
    return module.layout((num_outputs, depth), names, make, reason, scheme)


def awq_codes(words_DW: Tensor) -> Tensor:
    """[O, D] codes of AutoAWQ's words, each eight outputs back in their order."""
    codes_DO = unpack_words(words_DW, 4, words_DW.shape[1] * 8)
    eights = codes_DO.unflatten(1, (-1, 8))[:, :, list(AWQ_PLACES)]
    return eights.flatten(1).t().contiguous()
