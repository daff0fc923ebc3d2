"""The layers of a decoder by cpu.cpp, in one call for all of a step's tokens.

    decoder = DecoderLayers(sizes, layers, final_norm)
    hidden_TD = decoder.run(x_TD, rows)

Letters: T tokens, D hidden size, A rotary angles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.block_linear.cpu import BlockMatrix
from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import address, function
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.rotary.reference import Angles

OP = "decoder_pass"
MAX_HEAD_DIM = 512
KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class DecoderSizes(NamedTuple):
    hidden: int
    num_heads: int
    mlp_size: int
    eps: float  # of all norms
    offset: float
    activation: Activation


class LayerParts(NamedTuple):
    """What a layer is made of; norms' weights in any dtype."""

    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: BlockMatrix
    out: BlockMatrix
    gate_up: BlockMatrix
    down: BlockMatrix
    pages: Pages
    rope: int | None  # which of the step's angles turn q and k
    spec: AttentionSpec


class StepRows(NamedTuple):
    """Where a step's tokens stand; int32 but for the angles."""

    angles: Sequence[Angles]  # cosines and sines [T, A]
    slots: Tensor
    starts: Tensor
    tables: PageTables


class _Layer(ctypes.Structure):
    """As cpu.cpp has it, and so are those below."""

    _fields_ = (
        *((name, c_void_p) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down", "k_pages", "v_pages")),
        *((name, c_int64) for name in ("rope", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("head_dim", "page_size", "mlp_size")),
        *((name, c_float) for name in ("eps", "offset")),
        *((name, c_int32) for name in ("activation", "kv")),
    )


class _Turns(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("num_angles", c_int64))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "turns", "slots", "starts", "totals")),
        ("tables", c_void_p),
        *((name, c_int64) for name in ("table_stride", "num_sequences", "num_tokens")),
    )


def supported(pages: Pages) -> bool:
    held = pages.k_pages
    return pages.k_scale is None and held.dtype in KV_DTYPES and held.shape[3] <= MAX_HEAD_DIM


class DecoderLayers:
    """`host_library.load("decoder_pass")` comes first."""

    def __init__(
        self, sizes: DecoderSizes, layers: Sequence[LayerParts], final_norm: Tensor
    ) -> None:
        self._held: list[object] = [layers]
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        pages = layers[0].pages.k_pages
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            self._number(final_norm),
            len(layers),
            sizes.hidden,
            sizes.num_heads,
            pages.shape[1],
            pages.shape[3],
            pages.shape[2],
            sizes.mlp_size,
            sizes.eps,
            sizes.offset,
            KINDS[sizes.activation],
            KV_DTYPES[pages.dtype],
        )
        self._address = ctypes.addressof(self._decoder)
        self._run = function(OP, "run", "ppi")

    def run(self, x_TD: Tensor, rows: StepRows) -> Tensor:
        """Hidden states after the last norm, in fp32; **x is changed in place** where it is fp32.
        Keys and values go into the pages.
        """
        x_TD = x_TD.float().contiguous()
        out_TD = torch.empty_like(x_TD)
        turns = (_Turns * len(rows.angles))(
            *(_Turns(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in rows.angles)
        )
        page_table, lengths = rows.tables.page_table, rows.tables.lengths
        step = _Step(
            x_TD.data_ptr(),
            out_TD.data_ptr(),
            ctypes.addressof(turns),
            rows.slots.data_ptr(),
            rows.starts.data_ptr(),
            lengths.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            lengths.shape[0],
            x_TD.shape[0],
        )
        self._run(self._address, ctypes.addressof(step), torch.get_num_threads())
        return out_TD

    def _layer(self, parts: LayerParts) -> _Layer:
        matrices = (parts.qkv, parts.out, parts.gate_up, parts.down)
        return _Layer(
            self._number(parts.attn_norm),
            self._number(parts.mlp_norm),
            self._number(parts.q_norm),
            self._number(parts.k_norm),
            *(matrix.address for matrix in matrices),
            parts.pages.k_pages.data_ptr(),
            parts.pages.v_pages.data_ptr(),
            -1 if parts.rope is None else parts.rope,
            parts.spec.window or 0,
            parts.spec.scale,
            parts.spec.softcap or 0.0,
        )

    def _number(self, weight: Tensor | None) -> int | None:
        """The address of a norm's weight in fp32."""
        if weight is None:
            return None
        held = weight.detach().float().contiguous()
        self._held.append(held)
        return address(held)
