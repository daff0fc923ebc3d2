"""Batch and memory: requests that share steps, how many tokens a step takes, pages, beginnings that
are kept, tokens drafted ahead.

That requests share steps at all comes early: what every later rung gives depends on the batch.
"""

from __future__ import annotations

from functools import partial

from ridgeline.kernels.pages import PAGE_SIZES
from ridgeline.ladder.rungs.base import Offer, Rung, RungContext
from ridgeline.profiling.predicting.prediction import Area
from ridgeline.recipe import usual_limits

LEAST_BUDGET = 256  # tokens: smaller steps leave matrix units idle


def batching(context: RungContext) -> Offer | str:
    if context.facts.concurrency < 2:
        return "requests come one after the other"
    batch = usual_limits(not context.facts.on_cpu).max_batch
    if context.filled.limits.max_batch == batch:
        return "they share steps already"
    return Offer(
        {"limits.max_batch": batch}, f"up to {batch} requests share the weights read in a step"
    )


def larger_batch(context: RungContext) -> Offer | str:
    now = context.filled.limits.filled().max_batch
    if context.facts.concurrency <= now:
        return f"no more than {context.facts.concurrency} requests are there at once"
    edit = {"limits.max_batch": 2 * now}
    if context.filled.limits.filled().token_budget < 2 * now:
        edit["limits.token_budget"] = 2 * now
    return Offer(edit, f"{context.facts.concurrency} requests wait for {now} places")


def token_budget(factor: float, context: RungContext) -> Offer | str:
    limits = context.filled.limits.filled()
    wanted = int(factor * limits.token_budget)
    tokens = context.facts.longest_prompt * context.facts.concurrency
    if tokens <= limits.token_budget:
        return f"all prompts together have {tokens} tokens; a step takes {limits.token_budget}"
    if wanted < max(LEAST_BUDGET, limits.max_batch):
        return f"a step of {wanted} tokens would be too small"
    more = "fewer, larger steps" if factor > 1 else "prompts hold up running requests less"
    return Offer({"limits.token_budget": wanted}, more)


def page_size(size: int, context: RungContext) -> Offer | str:
    if size not in PAGE_SIZES:
        return f"pages of {size} tokens are not made"
    now = context.filled.kv.page_size
    if now == size:
        return "pages have that size already"
    return Offer({"kv.page_size": size}, f"pages of {size} tokens instead of {now}")


def prefix_cache(context: RungContext) -> Offer | str:
    if context.facts.prefix_share <= 0:
        return "no two prompts of the workload begin alike; it stays on, which costs nothing"
    if context.state.recipe.kv.prefix_cache:
        return "it is on already"
    share = f"{context.facts.prefix_share:.0%} of the prompt tokens came before"
    return Offer({"kv.prefix_cache": True}, share)


def prompt_lookup(context: RungContext) -> Offer | str:
    if context.state.recipe.speculation.method != "none":
        return "tokens are drafted ahead already"
    offer = Offer({"speculation.method": "prompt-lookup"}, "outputs may repeat their prompts")
    return _no_text(context) or offer


def draft_model(context: RungContext) -> Offer | str:
    if context.facts.draft_model is None:
        return "no draft model was named (--draft-model)"
    if context.state.recipe.speculation.method == "draft":
        return "it drafts tokens already"
    edit = {"speculation.method": "draft", "speculation.draft_model": context.facts.draft_model}
    return _no_text(context) or Offer(edit, "a small model of the same words drafts tokens")


def _no_text(context: RungContext) -> str | None:
    """Why nothing can be learned of drafts here."""
    if context.facts.has_random_weights:
        return "random weights repeat themselves: right drafts say nothing of a real model"
    if not context.facts.has_text:
        return "the workload's prompts are not text: how many drafts are right depends on it"
    return None


AREA: Area = "batch and memory"
BATCHING = Rung("batching", AREA, "requests that share steps", batching)
RUNGS = (
    Rung("larger-batch", AREA, "twice as many requests at once", larger_batch),
    Rung("more-tokens", AREA, "steps of twice the tokens", partial(token_budget, 2.0)),
    Rung("fewer-tokens", AREA, "steps of half the tokens", partial(token_budget, 0.5)),
    Rung("pages-128", AREA, "pages of 128 tokens", partial(page_size, 128)),
    Rung("pages-32", AREA, "pages of 32 tokens", partial(page_size, 32)),
    Rung("prefix-cache", AREA, "beginnings kept for others", prefix_cache),
    Rung("prompt-lookup", AREA, "tokens drafted from the text so far", prompt_lookup),
    Rung("draft-model", AREA, "tokens drafted by a draft model", draft_model),
)
