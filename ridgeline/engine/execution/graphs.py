"""Steps as captured graphs: a small step is launched in two calls instead of some hundreds.

Which steps share a graph is in graph_kinds.py. A kind is captured when it is first met; one with
decode rows and prompts when it comes again, as it may be the only one of its size. A graph is the
forward pass up to the logits; a second one samples from them, with or without filters,
so that a grammar's masks can be filled in between; where nothing follows the choice, it also leaves
the tokens where the host and the next step look for them. All of them share one pool of memory and
stay within what was planned for them; a step for which no graph is left, or whose capture failed,
runs as any other.

Capture is safe because the step has just run with the very same tensors: kernels are compiled and
counters exist, inputs and logits lie where they always lie, and nothing in the captured code reads
a number back. `notes` has the ops of each graph in the order of their launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.capture import capture
from ridgeline.engine.execution.graph_kinds import (
    DECODE_SIZES,
    MANY_PROMPTS,
    GraphLimits,
    graph_kind,
    is_mixed,
    padded,
    up_to,
)
from ridgeline.engine.execution.step_pass import PassKind, SamplingKind, StepPass
from ridgeline.engine.memory.footprint import NUM_GRAPHS, driver_bytes
from ridgeline.engine.steps.batch import StepInputs
from ridgeline.engine.steps.notes import Note, noting
from ridgeline.kernels.launch import only_compiling
from ridgeline.models import Transformer

log = logging.getLogger(__name__)


class GraphWork(Protocol):
    """What is captured: the two halves of a step, as the runner puts them together. They only
    enqueue, and read and write tensors that never move.
    """

    @property
    def model(self) -> Transformer: ...

    @property
    def max_batch(self) -> int:
        """Streams that decode at once, at most."""

    @property
    def max_rows(self) -> int:
        """Rows of logits in a step, at most."""

    @property
    def notes(self) -> list[Note] | None:
        """Where ops are noted that run launch by launch."""

    @property
    def judges(self) -> bool:
        """Whether `keep` judges drafts, too."""

    def forward(
        self, inputs: StepInputs, kind: PassKind, notes: list[Note] | None = None
    ) -> Tensor:
        """Hidden states of all tokens [T, D]."""

    def choose(
        self, logits_RV: Tensor, inputs: StepInputs, kind: SamplingKind, trial: bool = False
    ) -> Tensor:
        """Tokens of all rows, kept where the kind says so and it is no trial."""

    def keep(self, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor) -> None:
        """Leave the tokens for the host and the next step."""


@dataclass
class Captured:
    """The graphs of a kind of passes."""

    forward: torch.cuda.CUDAGraph
    notes: list[Note]
    samplers: dict[SamplingKind, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


class Graphs:
    """Captures for steps of up to `max_tokens` tokens, in sequences of up to `max_context`, until
    they take `budget_bytes`.
    """

    compiles_at_once = True  # the kernels of a step, before it is run
    has_ranks = False  # that run the same steps

    def __init__(
        self, work: GraphWork, max_tokens: int, max_context: int, budget_bytes: int
    ) -> None:
        self.work = work
        self.limits = GraphLimits(max_tokens, max_context, work.max_batch)
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self.captured: dict[PassKind, Captured] = {}
        self.refused: set[PassKind] = set()  # whose capture failed
        self.met: set[PassKind] = set()  # once: captured if they come again
        self.setup_s = 0.0  # that compiling and capturing took, in which no step could run
        self.by_hand = False  # run what is captured launch by launch, for whoever traces it
        # Numbers are not right in a pass in which no kernel runs: experts are chosen by them.
        has_experts = any(layer.experts for layer in work.model.config.layers)
        self.finds_its_way = not has_experts and not self.has_ranks
        self._pool: Any = None
        # Where every graph leaves its logits: one buffer for all, or each would keep its own.
        most = padded(min(max_tokens, work.max_rows), up_to(DECODE_SIZES, max_tokens))
        rows = max(MANY_PROMPTS, most or max_tokens)
        self.device, dtype = work.model.embed.weight.device, work.model.logits_dtype
        shape = (rows, work.model.config.vocab_size)
        self.logits_RV = torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def notes(self) -> dict[PassKind, list[Note]]:
        """Of each forward pass, and of the choice that was captured with it."""
        return {kind: captured.notes for kind, captured in self.captured.items()}

    def kind_for(self, step: StepPass, max_length: int) -> PassKind | None:
        """The kind whose graphs run a step, captured or to be captured; None if it has none.
        Embeddings and prompt log-probabilities need the hidden states, which a graph does not give
        out.
        """
        plan, jobs = step.plan, step.jobs
        if not step.in_order or any(
            jobs[key[0]].pooling is not None or jobs[key[0]].sampling.prompt_logprobs is not None
            for key in plan.keys[plan.num_decode_rows :]
        ):
            return None
        kind = graph_kind(plan, self.limits, max_length)
        if kind is None or kind in self.refused:
            return None
        if kind in self.captured:
            return kind
        if is_mixed(kind) and kind not in self.met:
            self.met.add(kind)
            return None
        return kind if self._has_room() else None

    def replay(
        self, kind: PassKind, inputs: StepInputs, sampling: SamplingKind
    ) -> tuple[Tensor, Tensor]:
        """Logits and tokens of a step, padded as its kind is; captured now if need be."""
        captured = self.captured.get(kind)
        if captured is None or sampling not in captured.samplers:
            return self._run_and_capture(kind, inputs, sampling)
        if self.by_hand:
            logits_RV = self.compute(kind, inputs, self.work.notes)
            return logits_RV, self.work.choose(logits_RV, inputs, sampling)
        captured.forward.replay()
        graph, tokens_R = captured.samplers[sampling]
        graph.replay()
        return self.logits_RV[: kind.shape.num_samples], tokens_R

    def _run_and_capture(
        self, kind: PassKind, inputs: StepInputs, sampling: SamplingKind
    ) -> tuple[Tensor, Tensor]:
        """The step itself, eagerly: that also makes its kernels' counters. Then its graphs, which
        run nothing now. The last step's tokens are only written over, and drafts judged, behind
        that: what the graphs are captured with must still be there.
        """
        began = time.perf_counter()
        if self.compiles_at_once and self.finds_its_way:
            with only_compiling():
                self._eagerly(kind, inputs, sampling)
        self.setup_s += time.perf_counter() - began
        logits_RV, tokens_R = self._eagerly(kind, inputs, sampling)
        if self.device.type == "cuda":  # as capturing would: the step itself is no setup
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        try:
            self._add(kind, inputs, sampling, logits_RV)
        except Exception as error:
            self._refuse(kind, error)
        self.setup_s += time.perf_counter() - began
        if sampling.keeps:
            self.work.keep(logits_RV, inputs, tokens_R)
        return logits_RV, tokens_R

    def _eagerly(
        self, kind: PassKind, inputs: StepInputs, sampling: SamplingKind
    ) -> tuple[Tensor, Tensor]:
        """Logits and tokens of a step that leaves no trace but in its pages."""
        logits_RV = self.compute(kind, inputs)
        return logits_RV, self.work.choose(logits_RV, inputs, sampling, trial=True)

    def _add(
        self, kind: PassKind, inputs: StepInputs, sampling: SamplingKind, logits_RV: Tensor
    ) -> None:
        reserved_before = torch.cuda.memory_reserved(self.device)
        if kind not in self.captured:
            with noting(self.work.model) as notes:
                graph, _ = self._capture(lambda: self.compute(kind, inputs, notes))
            notes += self._notes_of(sampling, logits_RV)
            self.captured[kind] = Captured(graph, notes)
            self.used_bytes += driver_bytes(self.work.model.config)
        sampler = self._capture(lambda: self.work.choose(logits_RV, inputs, sampling))
        self.captured[kind].samplers[sampling] = sampler
        # What torch took, and not what the device has less of: others may share it.
        self.used_bytes += torch.cuda.memory_reserved(self.device) - reserved_before

    def _refuse(self, kind: PassKind, error: Exception) -> None:
        """Steps of this kind run without a graph from now on; the one at hand has run already."""
        reason = str(error).partition("\n")[0]
        log.warning("no graph for %s: %s: %s", kind, type(error).__name__, reason)
        self.refused.add(kind)
        self.captured.pop(kind, None)
        if not self.captured:
            self._pool = None  # gone with the last graph that used it

    def compute(
        self, kind: PassKind, inputs: StepInputs, notes: list[Note] | None = None
    ) -> Tensor:
        """The forward pass up to the logits, which are left in their buffer."""
        rows_RD = self.work.forward(inputs, kind, notes)
        if kind.shape.num_prompt_rows:  # without, each token has a row of logits, in their order
            rows_RD = rows_RD.index_select(0, inputs.logit_tokens)
        return self.work.model.logits(rows_RD, out=self.logits_RV[: kind.shape.num_samples])

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return capture(work, self._pool)

    def _has_room(self) -> bool:
        return len(self.captured) < NUM_GRAPHS and self.used_bytes < self.budget_bytes

    def _notes_of(self, sampling: SamplingKind, logits_RV: Tensor) -> list[Note]:
        ops = ["sampling"]
        if sampling.keeps:
            ops += ["keep_tokens", "prompt_lookup"] if self.work.judges else ["keep_tokens"]
        return [Note(op, tuple(logits_RV.shape)) for op in ops]
