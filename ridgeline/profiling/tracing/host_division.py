"""How steps on a CPU divide: by a clock that is read where scopes open and close.

What is inside modules and ops that compute is theirs. What is between them, in the modules around
them, is the price of many small calls, which counts as gaps; what is outside the model and its
sampling is the host's: planning, writing the step's numbers, telling who has ended.

    division = divide_host(spans, scopes.calls, windows, step_s)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ridgeline.models.transformer import Attention, ExpertMLP
from ridgeline.profiling.tracing.division import Division, by_group
from ridgeline.profiling.tracing.scopes import ScopeCall, ScopeSpan

WORTH_SAYING = 0.25  # of a step: watched ones that differ by more are told of
TimeWindow = tuple[float, float]  # seconds: from and to


def divide_host(
    spans: Sequence[ScopeSpan],
    calls: Sequence[ScopeCall],
    windows: Sequence[TimeWindow],
    step_s: float,
    plain: bool = False,
) -> Division:
    """`windows` are the steps that were watched; `plain`: in the plain loop, whose attention
    modules turn queries and keys by themselves.
    """
    windows = _undisturbed(windows)
    spans = [span for span in spans if any(a <= span.begin <= b for a, b in windows)]
    total = sum(end - begin for begin, end in windows)
    own = {span.call: span.end - span.begin for span in spans}
    for span in spans:
        if span.parent is not None:
            own[span.parent] -= span.end - span.begin
    work = {i: max(0.0, s) for i, s in own.items() if computes(calls[i], plain)}
    between = sum(max(0.0, s) for i, s in own.items() if i not in work)
    count = len(windows)
    ops = by_group(work, calls, count)
    gaps_s = between / count
    host_s = max(0.0, (total - sum(work.values()) - between) / count)
    num_ops = len(work) / count
    watched = Division(total / count, ops, 0.0, gaps_s, host_s, num_ops)
    apart = total / count / step_s - 1.0
    note = f"steps took {apart:+.0%} when they were watched; all parts are scaled"
    return watched.scaled(step_s, *([note] if abs(apart) > WORTH_SAYING else []))


def _undisturbed(windows: Sequence[TimeWindow]) -> list[TimeWindow]:
    """The shorter half: what else a machine does makes steps longer, never shorter."""
    ordered = sorted(windows, key=lambda window: window[1] - window[0])
    return ordered[: (len(ordered) + 1) // 2]


def computes(call: ScopeCall, plain: bool) -> bool:
    """Whether a scope's own time is work: of an op, of a module without parts, or with its own."""
    if call.kind == "op" or isinstance(call.module, ExpertMLP):
        return True
    if plain and isinstance(call.module, Attention):
        return True
    assert isinstance(call.module, nn.Module), f"{call.name} is neither op nor module"
    return next(call.module.children(), None) is None
