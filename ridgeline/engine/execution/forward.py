"""The forward pass of a step: from its numbers on the device to hidden states and logits, through
the attention and the copy of the model that suit the device and the recipe.

    hidden_TD = ForwardPass(model, recipe, kv, buffers)(inputs, kind)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.attention.decode_rows import DecodeRows
from ridgeline.engine.attention.fixed_attention import FixedCpuSequences, FixedSequences
from ridgeline.engine.attention.fresh_prompts import FreshPrompts
from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.attention.paged import CpuSequences, PagedSequences, num_table_pages
from ridgeline.engine.execution.buffers import StepBuffers
from ridgeline.engine.execution.step_pass import PassKind
from ridgeline.engine.loading.deterministic import deterministic
from ridgeline.engine.loading.host_model import on_host
from ridgeline.engine.loading.host_pass import HostPass, host_pass
from ridgeline.engine.steps.batch import StepInputs
from ridgeline.engine.steps.notes import Note
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.engine.steps.starting import StepStart, serves, start
from ridgeline.models import Transformer
from ridgeline.recipe import Recipe


class ForwardPass:
    """`model` is as it is run: a copy with other kinds of layers where the recipe asks for them."""

    def __init__(
        self, model: Transformer, recipe: Recipe, kv: KVCache, buffers: StepBuffers
    ) -> None:
        self.model, self.device = model, model.embed.weight.device
        self.kv, self.buffers = kv, buffers
        self.ropes = RopeTables(model.config, recipe.limits.filled().max_context, self.device)
        self.starts_at_once = self.device.type == "cuda" and serves(model)
        self.sequences: type[PagedSequences] = PagedSequences
        self.layers_at_once: HostPass | None = None
        if recipe.deterministic:
            self.model = deterministic(model)
            self.sequences = FixedCpuSequences if self.device.type == "cpu" else FixedSequences
        elif self.device.type == "cpu":
            self._use_host(fused=recipe.kernels == "fused")

    def _use_host(self, fused: bool) -> None:
        """On a CPU: its kernels, where they were built and the recipe does not forbid them."""
        self.sequences = CpuSequences
        if fused:
            self.model = on_host(self.model)
            if HostSequences.serves(self.kv, self.model.embed.weight.dtype):
                self.sequences = HostSequences
                self.layers_at_once = host_pass(self.model, self.kv)

    def __call__(
        self, inputs: StepInputs, kind: PassKind, notes: list[Note] | None = None
    ) -> Tensor:
        """Hidden states of all tokens [T, D]."""
        if self.starts_at_once:
            started = self._start(inputs, kind, notes)
            hidden_TD: Tensor = self.model(None, self._attention(inputs, kind, notes, started))
            return hidden_TD
        last_tokens = self.buffers.last_tokens
        sampled_T = last_tokens.index_select(0, inputs.sources.clamp(min=0))
        ids_T = torch.where(inputs.sources >= 0, sampled_T, inputs.ids)
        sequences = self._attention(inputs, kind, notes)
        if self.layers_at_once is not None and notes is None:  # notes are of single ops
            assert isinstance(sequences, HostSequences), type(sequences)
            hidden_TD = self.layers_at_once(ids_T, sequences)
        else:
            hidden_TD = self.model(ids_T, sequences)
        if issubclass(self.sequences, CpuSequences) and not hidden_TD.isfinite().all():
            self.kv.holds_nan = True  # those hide scores, which does not stop NaN
        return hidden_TD

    def _start(self, inputs: StepInputs, kind: PassKind, notes: list[Note] | None) -> StepStart:
        """All that comes before the first layer, in one launch."""
        if notes is not None:
            notes.append(Note("step_start", tuple(inputs.ids.shape)))
        num_pages = num_table_pages(kind.shape, kind.max_length, self.kv.page_size)
        table = self.buffers.page_table[:, :num_pages]
        return start(self.model, inputs, self.ropes, table, self.buffers.last_tokens)

    def _attention(
        self,
        inputs: StepInputs,
        kind: PassKind,
        notes: list[Note] | None,
        started: StepStart | None = None,
    ) -> PagedSequences:
        return self.sequences_for(kind)(
            kv=self.kv,
            ropes=self.ropes,
            inputs=inputs,
            shape=kind.shape,
            page_table=self.buffers.page_table,
            max_length=kind.max_length,
            notes=notes,
            started=started,
        )

    def sequences_for(self, kind: PassKind) -> type[PagedSequences]:
        """Decode rows alone may read pages while others are written, if none of them shares one."""
        if self.sequences is not PagedSequences:
            return self.sequences
        if kind.own_sequences and kind.shape.num_tokens == kind.shape.num_decode_rows:
            return DecodeRows
        return FreshPrompts if kind.fresh_prompts else PagedSequences

    def logits(self, rows_RD: Tensor) -> Tensor:
        """As the head makes them on a GPU, where sampling reads them as they are; else in fp32."""
        dtype, shape = self.model.logits_dtype, (len(rows_RD), self.model.config.vocab_size)
        if self.device.type == "cpu" or dtype == torch.float32:
            return self.model.logits(rows_RD)
        return self.model.logits(rows_RD, out=rows_RD.new_empty(shape, dtype=dtype))
