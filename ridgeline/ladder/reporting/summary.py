"""A climb summarized for the page and the terminal: its results, how good the predictions were,
and which recipe fields changed.

    facts(climb)     # ["5.12× in 5 paired rounds, 95% interval 5.01 to 5.23×", …]
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ridgeline.hardware.units import human, human_bytes, is_over, over_words, percent
from ridgeline.ladder.outcome import Figures, RungOutcome, RungStatus, Side
from ridgeline.ladder.reporting.levels import (
    bound_words,
    defaults_words,
    over_peer,
    peer_notes,
    peer_words,
)
from ridgeline.ladder.reporting.result import Climb, paired_words, rate, shown_ratio
from ridgeline.profiling.drawing import times
from ridgeline.profiling.predicting.accuracy import PredictionOutcome

NOT_KEPT: dict[RungStatus, str] = {
    "dropped": "measured, and not worth it or outside the quality bound",
    "failed": "ended with an error; the climb went on",
    "not reached": "the time given was spent",
    "not applicable": "nothing was run",
}
NONE = "–"
HELD = "requests/s held"  # the first comparison, where a latency bound was given
LIMIT = "share of the hardware limit"


class Pair(NamedTuple):
    """A figure before and after."""

    name: str
    before: str
    after: str


OVER_PLAIN = "the answer, in turns with the plain loop"


class Comparison(NamedTuple):
    """The answer against something else."""

    name: str
    value: str
    detail: str


def comparisons(climb: Climb) -> list[Comparison]:
    """What the report leads with: over the defaults, over the plain loop, of the limit."""
    result = [*_held_rates(climb), _over_start(climb)]
    if climb.peer is not None and (
        ratio := over_peer(climb.peer, climb.after.figures, climb.levels)
    ):
        result.append(Comparison("over the peer", ratio, climb.peer.url))
    if climb.over_plain is not None:
        ratio, how = times(climb.over_plain), climb.over_plain_words
        result.append(Comparison("over the plain loop", ratio, how))
    share = climb.after.figures.share_of_limit
    if share is not None:
        before = f"before: {_share(climb.before.figures)}"
        result.append(Comparison("of the hardware limit", _share(climb.after.figures), before))
    return result


def _held_rates(climb: Climb) -> list[Comparison]:
    """Where a latency bound was given, and a rate is held."""
    levels = climb.levels
    chosen = None if levels is None else levels.of(levels.chosen)
    held = None if levels is None or chosen is None else levels.rate_of(chosen)
    if levels is None or held is None:
        return []
    detail = f"within {bound_words(levels.bound)}{defaults_words(levels)}"
    return [Comparison(HELD, f"{held:.3g}", detail)]


def _over_start(climb: Climb) -> Comparison:
    name = "over the defaults" if climb.ladder else "over the beginning"
    before, after = (rate(side.figures.output_tokens_per_s) for side in (climb.before, climb.after))
    if not climb.kept:
        return Comparison(name, times(1.0), f"{before} {climb.rate_unit}")
    if climb.total is None:
        return Comparison(name, f"≈ {times(climb.kept_product)}", "by the changes kept one by one")
    rates = f"{after} instead of {before} {climb.rate_unit}"
    if climb.total.low <= 1.0:
        rates = f"not beyond noise; {rates}"
    return Comparison(name, shown_ratio(before, after), rates)


def measured(climb: Climb) -> list[RungOutcome]:
    """Those that have a place in the waterfall: run, or expected to give something."""
    return [
        rung
        for rung in climb.rungs
        if rung.status in ("kept", "dropped", "failed")
        or (rung.status == "not reached" and rung.predicted is not None)
    ]


def not_kept(climb: Climb) -> list[RungOutcome]:
    """In the order of NOT_KEPT, and of the climb."""
    return [rung for status in NOT_KEPT for rung in climb.rungs if rung.status == status]


def predictions(climb: Climb) -> list[PredictionOutcome]:
    """What was both predicted and measured: to be remembered (profiling/predicting/accuracy.py)."""
    device = str(climb.hardware.get("name", "unknown"))
    result = []
    for rung in climb.rungs:
        text, came = rung.predicted, rung.achieved
        if text is None or came is None or not _positive(text.speedup, came.value):
            continue
        has_ends = _positive(text.low, text.high)
        result.append(
            PredictionOutcome(
                rung.area,
                rung.name,
                text.speedup,
                came.value,
                device,
                climb.model,
                low=text.low if has_ends else None,
                high=text.high if has_ends else None,
                created=climb.created,
            )
        )
    return result


def _positive(*values: float) -> bool:
    return all(0 < value < math.inf for value in values)


def predictions_in_words(climb: Climb) -> str:
    """Empty where nothing was predicted and measured."""
    known = predictions(climb)
    if not known:
        return ""
    close = sum(each.is_close for each in known)
    held = [each.held for each in known if each.held is not None]
    text = f"{close} of {len(known)} predictions came within ±20% of what was measured"
    return text + (f", {sum(held)} of {len(held)} inside their interval" if held else "")


def quality_in_words(climb: Climb) -> str:
    """Of the model as it is now: what the last kept rung with a measurement says."""
    if climb.is_training:
        return losses_in_words(climb)
    if not climb.bounds:
        return "quality was not measured (--quality off)"
    differences = [rung.difference for rung in climb.kept if rung.difference is not None]
    if differences:
        return f"outputs differ by {differences[-1].relative_error:.1e} of their size"
    result = [rung.quality for rung in climb.kept if rung.quality is not None]
    if not result:
        return "nothing kept changes the model's answers" if climb.kept else ""
    last = result[-1]
    where = "inside the bound" if last.problem is None else last.problem
    return f"mean KL {last.mean_kl:.4f} nats, perplexity {last.ppl_increase:+.2%}: {where}"


def losses_in_words(climb: Climb) -> str:
    """Time to the same loss, which is what counts, and what the loss is."""
    result = [rung.losses for rung in climb.kept if rung.losses is not None]
    if not result:
        if not climb.kept:
            return ""
        return "nothing kept alters what is learned: the same loss is reached as much sooner"
    last = result[-1]
    gain = last.equal_loss_gain
    time = "the loss did not fall in these steps" if gain is None else (
        f"{times(gain)} the defaults' speed to an equal loss"
    )  # fmt: skip
    return f"{time}; loss {last.increase:+.2%} over {last.num_seeds} paired seeds"


def no_quality(climb: Climb) -> str:
    """Why there is none to show."""
    if climb.bounds:
        return "No change that was run alters the model's answers, so none was compared."
    return "Quality was not measured in this climb (--quality off)."


def bounds_in_words(climb: Climb) -> str:
    names = {
        "max_error": "relative error at most {:g}",
        "max_kl": "mean KL at most {:g}",
        "max_ppl_increase": "perplexity at most {:+.2%}",
        "max_loss_increase": "loss over paired seeds at most {:+.2%}",
    }
    known = [
        names[key].format(value)
        for key, value in climb.bounds.items()
        if value is not None and key in names
    ]
    return ", ".join(known) or "none: quality was off"


def facts(climb: Climb) -> list[str]:
    """Below the headline."""
    result = []
    if climb.total is not None:
        result.append(paired_words(climb.total))
    elif climb.kept:
        result.append("before and after were not measured in the same rounds")
    if climb.over_plain is not None:
        result.append(f"{times(climb.over_plain)} the plain loop, {climb.over_plain_words}")
    if climb.peer is not None:
        result.append(peer_words(climb.peer, climb.after.figures, climb.levels))
    result += [text for text in (quality_in_words(climb),) if text]
    count = f"{len(climb.kept)} of {len(climb.rungs)} changes kept"
    took = f"{count} in {duration(climb.seconds)}"
    if climb.first_answer_s is not None:
        took += f", the first answer after {duration(climb.first_answer_s)}"
    return [*result, took]


def time_rows(climb: Climb) -> list[tuple[str, float]]:
    """Where the time went, the rest included; empty where nobody wrote it down."""
    if not climb.time_ledger:
        return []
    rest = climb.seconds - sum(climb.time_ledger.values())
    rows = [*climb.time_ledger.items(), ("starting processes, and the rest", max(0.0, rest))]
    return [(name, spent) for name, spent in rows if spent >= 0.5]


def figure_pairs(climb: Climb) -> list[Pair]:
    """What is known of one side at least."""
    before, after = climb.before.figures, climb.after.figures
    rows = [
        Pair(climb.rate_unit, rate(before.output_tokens_per_s), rate(after.output_tokens_per_s)),
        *_time_pairs(climb, before, after),
        Pair(LIMIT, _share(before), _share(after)),
        Pair("weights", human_bytes(before.weight_bytes), human_bytes(after.weight_bytes)),
    ]
    return [row for row in rows if (row.before, row.after) != (NONE, NONE)]


def _time_pairs(climb: Climb, before: Figures, after: Figures) -> list[Pair]:
    names = {
        "first_token_s": "to the first token",
        "per_output_token_s": "per output token",
        "request_s": climb.call_name,
    }
    return [
        Pair(name, seconds(getattr(before, key)), seconds(getattr(after, key)))
        for key, name in names.items()
    ]


def _share(figures: Figures) -> str:
    share = percent(figures.share_of_limit) or NONE
    return f"{share}, above it" if is_over(figures.share_of_limit) else share


def notes(climb: Climb) -> list[str]:
    """What a reader must know, shares that cannot be among it."""
    shares = {
        f"the workload, {name}": side.figures.share_of_limit
        for name, side in (("before", climb.before), ("after", climb.after))
    }
    shares |= {point.label: point.share for point in (*climb.before.roof, *climb.after.roof)}
    return [*climb.notes, *peer_notes(climb.peer), *filter(None, [over_words(shares)])]


def changed_fields(climb: Climb) -> list[Pair]:
    """The recipe's fields that are others now, dotted, and the loop."""
    before, after = recipe_fields(climb.before), recipe_fields(climb.after)
    names = dict.fromkeys([*before, *after])
    rows = [Pair(name, plain(before.get(name)), plain(after.get(name))) for name in names]
    return [row for row in rows if row.before != row.after]


def recipe_fields(side: Side) -> dict[str, Any]:
    """Dotted, and the loop."""
    return {"loop": side.loop, **_flat(side.recipe)}


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def edit_in_words(rung: RungOutcome) -> str:
    return ", ".join(f"{name} = {plain(value)}" for name, value in rung.edit.items())


def plain(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def seconds(value: float | None) -> str:
    return NONE if value is None else human(value, "s")


def duration(total_s: float) -> str:
    minutes, rest = divmod(round(total_s), 60)
    return f"{minutes} min {rest} s" if minutes else f"{total_s:.3g} s"


def when(climb: Climb) -> str:
    """`2026-11-15 19:02 UTC`; as it is where it is no such time."""
    try:
        made = datetime.fromisoformat(climb.created)
    except ValueError:
        return climb.created
    return f"{made.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if made.tzinfo else climb.created


def shell(command: tuple[str, ...]) -> str:
    return shlex.join(command)


def device_in_words(hardware: Mapping[str, Any]) -> str:
    name = str(hardware.get("name", "unknown device"))
    threads = hardware.get("num_threads")
    if not isinstance(threads, int) or threads < 1:
        return name
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"
