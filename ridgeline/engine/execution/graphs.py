"""Steps as captured graphs: a small step is launched in two calls instead of some hundreds.

Two kinds of steps are captured, each when it is first met: decode rows alone, and a few prompts of
at most `max_tokens` tokens together. Their sizes are padded up, so that few graphs serve all. A
graph is the forward pass up to the logits; a second one samples from them, with or without filters,
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
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.capture import capture
from ridgeline.engine.loading.footprint import FEWEST_DRAFTED, NUM_GRAPHS, driver_bytes
from ridgeline.engine.sampling.extras import Jobs, Pending
from ridgeline.engine.sampling.sampling import plain
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepInputs, StepShape, shape_of
from ridgeline.engine.steps.flat_plan import of_own_sequences
from ridgeline.engine.steps.notes import Note, noting
from ridgeline.kernels.launch import only_compiling

if TYPE_CHECKING:
    from ridgeline.engine.execution.runner import Runner

log = logging.getLogger(__name__)

# From 128 on, sizes that cuBLAS is good at, since padding costs less than a bad size: on the H200 a
# layer of an 8B model takes 205 µs with 304 rows and 217 with 320, 270 with 432 and 402 with 448.
DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 208, 256, 304, 384, 432, 512)
PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 384, 512)  # tokens
PROMPT_ROWS = 8  # prompts in one graph, one of them to hold the padding
LENGTH_STEP = 4  # decode graphs are made for sequences up to 1024, 4096, … tokens
SHORTEST_LENGTH = 1024


class GraphKey(NamedTuple):
    shape: StepShape
    max_length: int  # of sequences in decode rows
    own_sequences: bool = True  # whether each decode row is of another one: see decode_rows.py


class GraphSampling(NamedTuple):
    """What a graph that samples does."""

    filtered: bool  # whether a row asks for top-k, top-p or min-p
    keeps: bool  # whether it also keeps the tokens: see `Runner.keeps`


@dataclass
class Captured:
    """The graphs of a key."""

    forward: torch.cuda.CUDAGraph
    notes: list[Note]
    samplers: dict[GraphSampling, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


def padded(size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of `sizes` that holds this many."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def length_bound(length: int) -> int:
    """Of the decode graphs that serve a sequence of this length."""
    bound = SHORTEST_LENGTH
    while bound < length:
        bound *= LENGTH_STEP
    return bound


def bounds_below(length: int) -> Iterator[int]:
    """The bounds that sequences of up to this length pass, each of which needs another graph."""
    bound = SHORTEST_LENGTH
    while bound < length:
        yield bound
        bound *= LENGTH_STEP


def graph_key(
    plan: StepPlan, max_tokens: int, max_length: int, max_context: int
) -> GraphKey | None:
    """The graph that can serve a step, or None: the step is mixed, or too large."""
    shape = shape_of(plan)
    if not shape.num_samples:
        return None
    if shape.num_prompt_rows == 0:
        own_sequences = of_own_sequences(plan)
        fewest = shape.num_tokens if own_sequences else min(FEWEST_DRAFTED, max_tokens)
        size = padded(max(shape.num_tokens, fewest), _up_to(DECODE_SIZES, max_tokens))
        if size is None or shape.num_samples != shape.num_tokens:
            return None
        shape = StepShape(size, size, 0, size)
        return GraphKey(shape, min(length_bound(max_length), max_context), own_sequences)
    if shape.num_decode_rows or shape.num_prompt_rows >= PROMPT_ROWS:
        return None
    size = padded(shape.num_tokens, _up_to(PROMPT_SIZES, max_tokens))
    if size is None or shape.num_samples > PROMPT_ROWS:
        return None
    if size - shape.num_tokens > max_context:  # the padding is a sequence too
        return None
    return GraphKey(StepShape(size, 0, PROMPT_ROWS, PROMPT_ROWS), max_context)


@cache
def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes that are allowed, the limit itself the last."""
    return (*(size for size in sizes if size < limit), limit)


class Graphs:
    compiles_at_once = True  # the kernels of a step, before it is run
    has_ranks = False  # that run the same steps

    def __init__(self, runner: Runner, max_tokens: int, budget_bytes: int) -> None:
        self.runner, self.max_tokens, self.budget_bytes = runner, max_tokens, budget_bytes
        self.used_bytes = 0
        self.found: dict[GraphKey, Captured] = {}
        self.refused: set[GraphKey] = set()  # whose capture failed
        self.by_hand = False  # run what is captured launch by launch, for whoever traces it
        # Numbers are not right in a pass in which no kernel runs: experts are chosen by them.
        has_experts = any(layer.experts for layer in runner.model.config.layers)
        self.finds_its_way = not has_experts and not self.has_ranks
        self._pool: Any = None
        # Where every graph leaves its logits: one buffer for all, or each would keep its own.
        most = padded(min(max_tokens, runner.max_rows), _up_to(DECODE_SIZES, max_tokens))
        rows = max(PROMPT_ROWS, most or max_tokens)
        shape = (rows, runner.model.config.vocab_size)
        dtype = runner.model.logits_dtype
        self.logits_RV = torch.empty(shape, dtype=dtype, device=runner.device)

    @property
    def notes(self) -> dict[GraphKey, list[Note]]:
        """Of each forward pass, and of the choice that was captured with it."""
        return {key: captured.notes for key, captured in self.found.items()}

    def serves(self, plan: StepPlan, jobs: Jobs, samples: list[int]) -> bool:
        """Whether a step, or the part of one that is run, may go through a graph: embeddings and
        prompt log-probabilities need the hidden states, which a graph does not give out.
        """
        whole = samples == list(range(len(samples)))
        return whole and not any(
            jobs[key[0]].pooling is not None or jobs[key[0]].sampling.prompt_logprobs is not None
            for key in plan.keys[plan.num_decode_rows :]
        )

    def run(self, plan: StepPlan, jobs: Jobs, max_length: int) -> Pending | None:
        """Run a step through its graphs, captured now if need be; None if it has none."""
        runner = self.runner
        key = graph_key(plan, self.max_tokens, max_length, runner.max_context)
        if key is None or key in self.refused:
            return None
        if key not in self.found and not self._has_room():
            return None
        inputs = runner.send(plan, key.shape)
        count = len(plan.sample_keys)
        choice = GraphSampling(runner.is_filtered(plan), runner.keeps(plan, jobs))
        logits_RV, tokens_R = self._replay(key, inputs, choice)
        found = (logits_RV[:count], inputs, tokens_R[:count])
        return runner.finish(plan, jobs, *found, list(range(count)), choice.keeps)

    def _replay(
        self, key: GraphKey, inputs: StepInputs, choice: GraphSampling
    ) -> tuple[Tensor, Tensor]:
        captured = self.found.get(key)
        if captured is None or choice not in captured.samplers:
            return self._run_and_capture(key, inputs, choice)
        if self.by_hand:
            logits_RV = self.compute(key, inputs, self.runner.notes)
            return logits_RV, self.choose(logits_RV, inputs, choice, self.runner.last_tokens)
        captured.forward.replay()
        graph, tokens_R = captured.samplers[choice]
        graph.replay()
        return self.logits_RV[: key.shape.num_samples], tokens_R

    def _run_and_capture(
        self, key: GraphKey, inputs: StepInputs, choice: GraphSampling
    ) -> tuple[Tensor, Tensor]:
        """The step itself, eagerly: that also makes its kernels' counters. Then its graphs, which
        run nothing now. The last step's tokens are only written over, and guesses judged, behind
        that: what the graphs are captured with must still be there.
        """
        last_tokens = self.runner.last_tokens
        if self.compiles_at_once and self.finds_its_way:
            with only_compiling():
                self._eagerly(key, inputs, choice)
        logits_RV, tokens_R = self._eagerly(key, inputs, choice)
        try:
            self._add(key, inputs, choice, logits_RV, last_tokens)
        except Exception as error:
            self._refuse(key, error)
        if choice.keeps:
            self.runner.keep(logits_RV, inputs, tokens_R, last_tokens)
        return logits_RV, tokens_R

    def _eagerly(
        self, key: GraphKey, inputs: StepInputs, choice: GraphSampling
    ) -> tuple[Tensor, Tensor]:
        """Logits and tokens of a step that leaves no trace but in its pages."""
        logits_RV = self.compute(key, inputs)
        nobody = inputs._replace(judged=self.runner.nobody(inputs.judged))
        last_tokens = torch.empty_like(self.runner.last_tokens)
        return logits_RV, self.choose(logits_RV, nobody, choice, last_tokens)

    def _add(
        self,
        key: GraphKey,
        inputs: StepInputs,
        choice: GraphSampling,
        logits_RV: Tensor,
        last_tokens: Tensor,
    ) -> None:
        reserved_before = torch.cuda.memory_reserved(self.runner.device)
        if key not in self.found:
            with noting(self.runner.model) as notes:
                graph, _ = self._capture(lambda: self.compute(key, inputs, notes))
            notes += self._notes_of(choice, logits_RV)
            self.found[key] = Captured(graph, notes)
            self.used_bytes += driver_bytes(self.runner.model.config)
        sampler = self._capture(lambda: self.choose(logits_RV, inputs, choice, last_tokens))
        self.found[key].samplers[choice] = sampler
        # What torch took, and not what the device has less of: others may share it.
        self.used_bytes += torch.cuda.memory_reserved(self.runner.device) - reserved_before

    def _refuse(self, key: GraphKey, error: Exception) -> None:
        """Steps of this key run without a graph from now on; the one at hand has run already."""
        reason = str(error).partition("\n")[0]
        log.warning("no graph for %s: %s: %s", key, type(error).__name__, reason)
        self.refused.add(key)
        self.found.pop(key, None)
        if not self.found:
            self._pool = None  # gone with the last graph that used it

    def choose(
        self, logits_RV: Tensor, inputs: StepInputs, choice: GraphSampling, last_tokens: Tensor
    ) -> Tensor:
        """Tokens of all rows, kept where that is asked for."""
        self.runner.note("sampling", logits_RV)
        tokens_R = plain(logits_RV, inputs, choice.filtered)
        if choice.keeps:
            self.runner.note("keep_tokens", logits_RV)
            self.runner.keep(logits_RV, inputs, tokens_R, last_tokens)
        return tokens_R

    def compute(self, key: GraphKey, inputs: StepInputs, notes: list[Note] | None = None) -> Tensor:
        """The forward pass up to the logits, which are left in their buffer."""
        runner = self.runner
        rows_RD = runner.forward(inputs, key.shape, key.max_length, notes, key.own_sequences)
        if key.shape.num_prompt_rows:  # without, each token has a row of logits, in their order
            rows_RD = rows_RD.index_select(0, inputs.logit_tokens)
        return runner.model.logits(rows_RD, out=self.logits_RV[: key.shape.num_samples])

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return capture(work, self._pool)

    def _has_room(self) -> bool:
        return len(self.found) < NUM_GRAPHS and self.used_bytes < self.budget_bytes

    def _notes_of(self, choice: GraphSampling, logits_RV: Tensor) -> list[Note]:
        ops = ["sampling"]
        if choice.keeps:
            ops += ["keep_tokens", "prompt_lookup"] if self.runner.judges else ["keep_tokens"]
        return [Note(op, tuple(logits_RV.shape)) for op in ops]
