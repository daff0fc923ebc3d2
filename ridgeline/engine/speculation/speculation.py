"""What a recipe's speculation needs around a runner: who drafts, and the policy that asks.

The parts: drafter.py (lookup, and why verification is exact), draft_model.py, draft_policy.py
(how many), step_costs.py and rehearsal.py (what it costs), drafting.py (the loop's side); on
several ranks rank 0 drafts for all (execution/rank_drafts.py).
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.engine.execution.rank_drafts import SentDrafts
from ridgeline.engine.execution.rehearsal import rehearse
from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.sampling.drafter import Drafter, PromptLookup
from ridgeline.engine.scheduling.step_costs import StepCosts
from ridgeline.engine.speculation.draft_model import DraftModel
from ridgeline.engine.speculation.draft_policy import DraftPolicy
from ridgeline.models import Transformer
from ridgeline.recipe import Recipe, Speculation


def prepare(
    runner: Runner,
    recipe: Recipe,
    draft: Transformer | None,
    window: int | None,
    graph_bytes: int,
) -> DraftPolicy | None:
    """Give the runner somebody who drafts, and measure what that costs; None: nobody does.
    `window` and `graph_bytes` are for the draft.
    """
    speculation = recipe.speculation
    if speculation.method == "none":
        return None
    drafter = _drafter(runner, recipe, draft, window, graph_bytes)
    if isinstance(runner, TensorRunner) and not drafter.in_graph:
        drafter = SentDrafts(drafter, runner.group, runner.buffers.last_tokens)
    runner.drafter = drafter
    costs, ahead = StepCosts(), bool(recipe.overlap) and runner.moves
    rehearse(runner, costs, speculation.max_draft_tokens, ahead)
    return DraftPolicy(costs, speculation.max_draft_tokens, free=draft is None, ahead=ahead)


def _drafter(
    runner: Runner,
    recipe: Recipe,
    draft: Transformer | None,
    window: int | None,
    graph_bytes: int,
) -> Drafter:
    if draft is None:
        return PromptLookup(runner.buffers.drafts_SK, runner.max_context, recipe.speculation)
    plain = replace(recipe, speculation=Speculation())
    own = Runner(draft, plain, runner.kv.num_pages, graph_bytes)
    return DraftModel(own, runner, window, recipe.limits.filled().token_budget)
