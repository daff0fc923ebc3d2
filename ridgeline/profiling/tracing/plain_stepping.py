"""The same steps through the plain loop (engine/naive.py): one sequence, no pages.

with NaiveSteps(model, recipe).decoding(batch=1, context=512, num_steps=20) as step: ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.naive import CHUNK, OneSequence, check_memory, forward
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.choosing import Chooser
from ridgeline.engine.steps.notes import END, Note
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.pages import Pages
from ridgeline.models import Transformer
from ridgeline.models.cost import Chunk
from ridgeline.profiling.tracing.stepping import StepFunction
from ridgeline.recipe import Recipe


class _NotedSequence(OneSequence):
    """Says when attention begins and ends, where somebody traces."""

    notes: list[Note] | None = None

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        if self.notes is not None:
            self.notes.append(Note("attention", tuple(q_TNH.shape)))
        out_TNH = super().attend(layer, q_TNH, k_TKH, v_TKH, spec)
        if self.notes is not None:
            self.notes.append(END)
        return out_TNH


class NaiveSteps:
    """`recipe` has nothing left to "auto"; of it the plain loop has the dtype."""

    loop = "naive"
    num_ranks = ranks_a_device = 1

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        self.model, self.recipe, self.device = model, recipe, model.embed.weight.device
        self.notes: list[Note] | None = None
        self.pages: Pages | None = None

    @contextmanager
    def decoding(self, batch: int, context: int, num_steps: int) -> Iterator[StepFunction]:
        self._check_one(batch)
        longest = self.model.config.max_context
        last = min(longest, context + num_steps // 2 + 1)
        first = last - num_steps - 1
        if context > longest or first < 0:
            raise ContextLengthError(
                f"--context is {context} and {num_steps} steps are run; the model reaches "
                f"{longest} tokens; give a smaller context, or fewer --steps"
            )
        cache = self._cache(last + 1)
        cache.length = max(first, 1)
        chooser, token = self._chooser(), 1

        def step() -> None:
            nonlocal token
            token = self._token(chooser, [token], cache)

        with torch.inference_mode():
            cache.keys_LSKH.normal_()
            cache.values_LSKH.normal_()
            yield step

    @contextmanager
    def prefilling(self, batch: int, length: int) -> Iterator[StepFunction]:
        self._check_one(batch)
        if length >= self.model.config.max_context:
            raise ContextLengthError(
                f"--prefill is {length}; the model reaches {self.model.config.max_context} tokens; "
                "give a shorter prompt"
            )
        ids = torch.arange(length) % self.model.config.vocab_size
        prompt: list[int] = ids.tolist()

        def run() -> None:
            cache, chooser = self._cache(length + 1), self._chooser()
            for start in range(0, length, CHUNK):
                part = prompt[start : start + CHUNK]
                if start + CHUNK >= length:
                    self._token(chooser, part, cache)
                else:
                    forward(self.model, part, cache, length)

        with torch.inference_mode():
            yield run

    def pieces(self, batch: int, length: int) -> list[list[Chunk]]:
        starts = range(0, length, CHUNK)
        return [[Chunk(min(CHUNK, length - start), start)] for start in starts]

    def noting(self, notes: list[Note] | None) -> None:
        self.notes = notes

    def by_hand(self, yes: bool) -> bool:
        return False  # there are no graphs

    def watched_by(self, watch: StepWatch | None) -> bool:
        return False  # it waits for each token

    def _token(self, chooser: Chooser, tokens: list[int], cache: _NotedSequence) -> int:
        cache.notes = self.notes
        logits_V = forward(self.model, tokens, cache, cache.length + len(tokens))
        if self.notes is not None:
            self.notes.append(Note("sampling", (1, *logits_V.shape)))
        token = chooser.choose(logits_V).token
        if self.notes is not None:
            self.notes.append(END)
        return token

    def _cache(self, num_tokens: int) -> _NotedSequence:
        check_memory(self.model.config, self.model.embed.weight, num_tokens)
        with torch.inference_mode():
            return _NotedSequence(self.model, num_tokens)

    def _chooser(self) -> Chooser:
        sampling = Sampling(max_tokens=1, seed=0)
        with torch.inference_mode():
            return Chooser(sampling, [0], self.model.config.vocab_size, (), self.device)

    def _check_one(self, batch: int) -> None:
        if batch != 1:
            raise UsageError(f"--batch is {batch}; the plain loop runs one sequence; give 1")
