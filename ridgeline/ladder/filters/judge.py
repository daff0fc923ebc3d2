"""Whether a filter of data helps: proxy models are trained on the text before it and behind it,
with the same first weights, steps and tokens for each seed, and held to the same judged text, which
neither has learned. A filter is kept only if the loss falls beyond noise: the 95% interval of its
change over the seeds must end below zero.

    judgement = judge_filter(FilterOrder(config, before, after, judged), seeds=5)
    judgement.is_kept, judgement.reason
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.data.loading.split import split_data
from ridgeline.data.loading.tokenizing import read_tokens
from ridgeline.data.loading.windows import TokenWindows
from ridgeline.errors import NumericsError, UsageError
from ridgeline.ladder.training.losses import PairedShares, paired_shares
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.prepare import PlannedRun
from ridgeline.tuning.short_run import ShortRun, num_steps, plan_short

LEAST_SEEDS = 3


@dataclass(frozen=True)
class FilterOrder:
    config: TrainConfig  # of a proxy; its own data is left aside
    before: Path  # text as it was
    after: Path  # what the filter left of it
    judged: Path  # text that neither learns
    seeds: int = 5
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.seeds < LEAST_SEEDS:
            raise UsageError(f"--seeds is {self.seeds}; give at least {LEAST_SEEDS}")
        for name in ("before", "after"):
            if getattr(self, name).resolve() == self.judged.resolve():
                raise UsageError(
                    f"{self.judged} is learned and judged; give text that is not learned to --text"
                )
        if self.before.resolve() == self.after.resolve():
            raise UsageError(f"{self.before} is the text before the filter and behind it")


@dataclass(frozen=True)
class ProxySide:
    """One side of the comparison."""

    path: str
    num_tokens: int
    epochs: float  # that a run takes of it: above one the same text is learned again
    losses: tuple[float, ...]  # on the judged text, for each seed


@dataclass(frozen=True)
class Judgement:
    is_kept: bool
    reason: str
    change: float  # of the loss, as a share; below zero it is better behind the filter
    low: float
    high: float
    num_steps: int
    before: ProxySide
    after: ProxySide


def judge_filter(order: FilterOrder, progress: Progress | None = None) -> Judgement:
    """Both sides are planned before anything is trained; seeds take turns."""
    plans = [_plan(order, path, progress) for path in (order.before, order.after)]
    judged = _judged_windows(order.judged, plans[0], progress)
    losses: tuple[list[float], list[float]] = ([], [])
    for seed in range(order.seeds):
        for side, plan in enumerate(plans):
            if progress is not None:
                progress("training proxies", 2 * seed + side, 2 * order.seeds)
            losses[side].append(_proxy_loss(plan, judged, order.config.seed + seed))
    shares = paired_shares(*losses)
    sides = [
        _side(plan, path, tuple(each))
        for plan, path, each in zip(plans, (order.before, order.after), losses, strict=True)
    ]
    is_kept = shares.high < 0.0
    return Judgement(
        is_kept, reason_words(shares, is_kept), shares.mean, shares.low, shares.high,
        num_steps(plans[0].config), sides[0], sides[1],
    )  # fmt: skip


def reason_words(shares: PairedShares, is_kept: bool) -> str:
    """In the words of `optimize --train`."""
    text = (
        f"the loss is {shares.mean:+.2%} (at most {shares.high:+.2%} with 95% confidence over "
        f"{shares.num_seeds} seeds)"
    )
    if is_kept:
        return text
    return f"{text}, allowed is below 0" + (
        ": it is worse" if shares.low > 0 else ": no better beyond noise"
    )


def _plan(order: FilterOrder, path: Path, progress: Progress | None) -> PlannedRun:
    data = replace(order.config.data, path=str(path), held_out=0.0)
    config = replace(order.config, data=data)
    return plan_short(config, device=order.device, progress=progress)


def _judged_windows(path: Path, plan: PlannedRun, progress: Progress | None) -> TokenWindows:
    tokenizer = plan.source.tokenizer
    assert tokenizer is not None, "a run has one"
    store = read_tokens([path], tokenizer, progress).store
    return split_data(
        store,
        sequence_length=plan.config.data.sequence_length,
        vocab_size=plan.model.vocab_size,
    ).train


def _proxy_loss(plan: PlannedRun, judged: TokenWindows, seed: int) -> float:
    steps = num_steps(plan.config)
    with ShortRun(plan, seed) as run:
        for number in range(steps):
            if not math.isfinite(run.scheduled_step(steps)):
                raise NumericsError(
                    f"step {number + 1} of a proxy on {plan.config.data.path}: its loss is no "
                    "number; give a lower --lr"
                )
        loss = run.held_out_loss(judged)
    assert loss is not None, "windows have targets"
    return loss


def _side(plan: PlannedRun, path: Path, losses: tuple[float, ...]) -> ProxySide:
    windows = plan.data.train
    learned = num_steps(plan.config) * plan.config.batch.size
    return ProxySide(str(path), windows.num_tokens, learned / windows.num_windows, losses)
