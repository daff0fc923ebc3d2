"""The sequences of a step as the model asks for them: keys and values in pages.

On a GPU one kernel norms, turns and stores the projection, decode rows go to decode attention and
all others to prefill attention over pages (steps of decode rows alone may need less: see
decode_rows.py); on a CPU the reference stores, and kernels/host_attention attends. Letters as in
batch.py, and P pages of a sequence at most, N query heads, H head dim.

    hidden_TD = model(ids_T, PagedSequences(kv, ropes, inputs, table, shape))
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.steps.batch import StepInputs, StepShape
from ridgeline.engine.steps.notes import Note
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.engine.steps.starting import StepStart
from ridgeline.kernels import host_attention
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.decode_attention import decode_attention
from ridgeline.kernels.host_attention import DecodeItems, decode_items
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.prefill_attention import Packing, prefill_attention
from ridgeline.kernels.rotary import Angles, rotate
from ridgeline.kernels.rotary_pages import QKNorm, rotary_pages
from ridgeline.models import RopeConfig
from ridgeline.models.transformer import Attention, ProjectedSequences, RopeAngles


def num_table_pages(shape: StepShape, max_length: int, page_size: int) -> int | None:
    """How much of the page table a step needs; None: all of it."""
    return -(-max_length // page_size) if shape.num_tokens == shape.num_decode_rows else None


def norm_of(layer: Attention) -> QKNorm | None:
    """The layer's q/k norm as the kernels take it; None, if it has none."""
    q_norm, k_norm = layer.q_norm, layer.k_norm
    if q_norm is None or k_norm is None:
        return None
    return QKNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)


class PagedSequences(ProjectedSequences):
    """`page_table` has a line for each seat; `max_length` bounds the sequences of decode rows;
    `started` has what was looked up for the step already.
    """

    whole_rows = False  # whether a stream's last token and its drafts are best one row

    def __init__(
        self,
        kv: KVCache,
        ropes: RopeTables,
        inputs: StepInputs,
        shape: StepShape,
        page_table: Tensor,
        max_length: int,
        notes: list[Note] | None = None,
        started: StepStart | None = None,
    ) -> None:
        self.kv, self.ropes, self.inputs, self.notes = kv, ropes, inputs, notes
        self.num_decode = shape.num_decode_rows
        self.num_prompt_tokens = shape.num_tokens - shape.num_decode_rows
        self.max_length = max_length
        self.x_TD: Tensor | None = None
        self.known_angles: RopeAngles = {}
        if started is not None:
            self.x_TD, self.tables_BP, self.known_angles = started
        else:
            pages = num_table_pages(shape, max_length, kv.page_size)
            self.tables_BP = page_table[:, :pages].index_select(0, inputs.seats)

    @cached_property
    def decode_tables(self) -> PageTables:
        """The pages of decode rows."""
        D = self.num_decode
        return PageTables(
            self.tables_BP[:D], self.inputs.totals[:D], self.max_length, self.inputs.order
        )

    @cached_property
    def prompt_tables(self) -> PageTables:
        """The pages of all other rows."""
        return PageTables(self.tables_BP[self.num_decode :], self.inputs.totals[self.num_decode :])

    @cached_property
    def packing(self) -> Packing:
        """How the tokens of all other rows lie."""
        return Packing(self.inputs.starts)

    def take_embeddings(self) -> Tensor:
        x_TD, self.x_TD = self.x_TD, None
        assert x_TD is not None, "they were not looked up, or are taken already"
        return x_TD

    def angles(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        if rope in self.known_angles:
            return self.known_angles[rope]
        return self.ropes.angles(rope, self.inputs.positions, self.inputs.lengths)

    def attend_projected(self, layer: Attention, qkv_TC: Tensor, angles: Angles | None) -> Tensor:
        pages = self.kv.layers[layer.index]
        self._note("rotary_pages", qkv_TC)
        q_TNH = self._store(layer, qkv_TC, angles, pages)
        parts = []
        if self.num_decode:
            self._note("decode_attention", q_TNH[: self.num_decode])
            parts.append(self._decode(q_TNH[: self.num_decode], pages, layer.spec))
        if self.num_prompt_tokens:
            self._note("prefill_attention", q_TNH[self.num_decode :])
            parts.append(self._prompts(q_TNH[self.num_decode :], pages, layer.spec))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _note(self, op: str, x: Tensor) -> None:
        if self.notes is not None:
            self.notes.append(Note(op, tuple(x.shape)))

    def _store(
        self, layer: Attention, qkv_TC: Tensor, angles: Angles | None, pages: Pages
    ) -> Tensor:
        """K and V, normed and turned, into their slots; the queries likewise."""
        return rotary_pages(qkv_TC, angles, self.inputs.slots, pages, norm_of(layer))

    def _decode(self, q_DNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        return decode_attention(q_DNH, pages, self.decode_tables, spec)

    def _prompts(self, q_TNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        return prefill_attention(q_TNH, self.packing, pages, self.prompt_tables, spec)


class CpuSequences(PagedSequences):
    """The same on a CPU, where what follows from the page tables is worked out once a step."""

    whole_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.totals = self.inputs.totals.tolist()
        self.starts = self.inputs.starts.tolist()
        self.items: dict[int | None, DecodeItems] = {}  # by window
        slots_T = self.inputs.slots.long()
        self.all_written = bool((slots_T >= 0).all())
        self.pages_T, self.places_T = slots_T // self.kv.page_size, slots_T % self.kv.page_size

    def _store(
        self, layer: Attention, qkv_TC: Tensor, angles: Angles | None, pages: Pages
    ) -> Tensor:
        """The reference's arithmetic with fewer passes, in the usual case: values, all written."""
        if not self.all_written or pages.k_scale is not None or layer.q_norm is not None:
            return super()._store(layer, qkv_TC, angles, pages)
        num_kv_heads = pages.k_pages.shape[1]
        heads = qkv_TC.unflatten(-1, (-1, layer.head_dim))
        turned, v_TKH = heads[:, :-num_kv_heads].float(), heads[:, -num_kv_heads:]
        if angles is not None:
            turned = rotate(turned, *angles)
        turned = turned.to(qkv_TC.dtype)
        q_TNH, k_TKH = turned[:, :-num_kv_heads], turned[:, -num_kv_heads:]
        pages.k_pages[self.pages_T, :, self.places_T] = k_TKH.to(pages.k_pages.dtype)
        pages.v_pages[self.pages_T, :, self.places_T] = v_TKH.to(pages.v_pages.dtype)
        return q_TNH

    def _decode(self, q_DNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        items = self.items.get(spec.window)
        if items is None:
            tables = self.decode_tables
            items = decode_items(
                tables.page_table.numpy(), tables.lengths.numpy(), self.kv.page_size, spec.window
            )
            self.items[spec.window] = items
        return host_attention.decode_attention(
            q_DNH, pages, items, spec, clean=not self.kv.holds_nan
        )

    def _prompts(self, q_TNH: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        out_TNH = torch.empty_like(q_TNH)
        clean = not self.kv.holds_nan
        for row, (start, end) in enumerate(pairwise(self.starts), start=self.num_decode):
            out_TNH[start:end] = host_attention.prompt_attention(
                q_TNH[start:end], pages, self.tables_BP[row], self.totals[row], spec, clean
            )
        return out_TNH
