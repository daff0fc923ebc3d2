"""The tensors of a runner that steps read and write: made once and never moved, because captured
graphs hold their addresses.

    buffers = StepBuffers.for_recipe(recipe, device)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.execution.graph_kinds import MANY_PROMPTS
from ridgeline.engine.memory.footprint import FEWEST_DRAFTED
from ridgeline.engine.steps.batch import StepShape, num_words
from ridgeline.engine.steps.flat_plan import DraftSlots
from ridgeline.recipe import Recipe


@dataclass(frozen=True)
class StepBuffers:
    """int32, all of them."""

    max_rows: int  # rows of logits in a step
    draft_slots: DraftSlots  # where drafts lie in `last_tokens`
    page_table: Tensor  # [seats, pages]; the last seat is the padding's
    last_tokens: Tensor  # the last step's samples, and behind them the drafts of each seat
    # [2, R]: tokens, and whether their logits held NaN; with drafts [5, R], verdicts behind them.
    results: Tensor
    words: Tensor  # a step's numbers, see batch.py

    @classmethod
    def for_recipe(cls, recipe: Recipe, device: torch.device) -> StepBuffers:
        limits, speculation = recipe.limits.filled(), recipe.speculation
        num_seats = limits.max_batch + 1
        num_drafts = 0 if speculation.method == "none" else speculation.max_draft_tokens
        max_rows = limits.max_batch + min(limits.max_batch * num_drafts, limits.token_budget)
        if num_drafts:
            max_rows = max(max_rows, min(FEWEST_DRAFTED, limits.max_graph_batch))
        num_tokens = max(limits.token_budget, limits.max_graph_batch)
        padding = MANY_PROMPTS  # rows and samples that fill up a graph
        largest = StepShape(num_tokens, max_rows, limits.max_batch + padding, max_rows + padding)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            max_rows=max_rows,
            draft_slots=DraftSlots(max_rows, num_drafts),
            page_table=zeros(num_seats, -(-limits.max_context // recipe.kv.page_size)),
            last_tokens=zeros(max_rows + num_seats * num_drafts),
            results=zeros(5 if num_drafts else 2, max_rows),
            words=zeros(num_words(largest) + 2 * limits.token_budget),
        )

    @property
    def drafts_SK(self) -> Tensor:
        """The drafts for each seat's next step."""
        return self.last_tokens[self.draft_slots.first :].view(len(self.page_table), -1)
