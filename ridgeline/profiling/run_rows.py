"""A divided run in words, as rows of tables, for the terminal and the page.

run_sentence(document["run"])       # "throughput: 512 requests in 14.2 s, …"
run_tables(document["run"])         # its kinds of steps, and what it lost
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.hardware.units import human, percent

KIND_HEADINGS = ("steps", "number", "rows", "tokens", "time", "share", "idle", "of limit")
LOSS_HEADINGS = ("lost in", "by", "lost", "share", "of ceiling", "mended by")
TEXTS = ("steps", "lost in", "by", "mended by")
KIND_WORDS = (
    "Rows and tokens are means of a step; shares are of the run; idle is the device before such "
    "steps, as a share of their time."
)
LOSS_WORDS = "Lost is what an op takes beyond the time at its ceiling, and all waiting."
MOST_LOSSES = 10
LEAST_LOSS = 0.002  # of the run: less is not shown
RunJson = Mapping[str, Any]


class RunTable(NamedTuple):
    key: str
    title: str
    words: str  # what its figures are
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def run_tables(run: RunJson) -> list[RunTable]:
    return [
        RunTable("run", "The whole run", KIND_WORDS, KIND_HEADINGS, kind_rows(run)),
        RunTable(
            "losses", "What is lost, and what would mend it", LOSS_WORDS, LOSS_HEADINGS,
            loss_rows(run),
        ),
    ]  # fmt: skip


def rate_words(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def run_sentence(run: RunJson) -> str:
    text = (
        f"{run['workload']}: {run['num_requests']} requests in {human(run['wall_s'], 's')}, "
        f"{rate_words(run['output_tokens_per_s'])} output tokens/s"
    )
    if run["share_of_limit"] is not None:
        limit = human(run["limit_s"], "s")
        text += f", {run['share_of_limit']:.0%} of the limit ({limit} for these steps)"
    text += f"; the device was idle for {percent(run['device_idle_s'] / run['wall_s'])} of it"
    if run["no_requests_s"] > 0:
        text += f", and for {percent(run['no_requests_s'] / run['wall_s'])} no request was there"
    return text + "."


def kind_rows(run: RunJson) -> list[tuple[str, ...]]:
    """Of each kind of step, and what is beside steps."""
    rows: list[tuple[str, ...]] = [
        (
            kind["label"],
            f"{kind['num_steps']}",
            f"{kind['mean_rows']:.4g}",
            f"{kind['mean_tokens']:.4g}",
            human(kind["seconds"], "s"),
            percent(kind["share"]),
            percent(kind["idle_s"] / kind["seconds"]),
            "" if kind["share_of_limit"] is None else f"{kind['share_of_limit']:.0%}",
        )
        for kind in run["kinds"]
    ]
    others = {"no requests there": run["no_requests_s"], "before and after": run["beside_steps_s"]}
    for name, seconds in others.items():
        if seconds > LEAST_LOSS * run["wall_s"]:
            share = percent(seconds / run["wall_s"])
            rows.append((name, "", "", "", human(seconds, "s"), share, "", ""))
    return rows


def loss_rows(run: RunJson) -> list[tuple[str, ...]]:
    """The largest, and the rest in one line."""
    rows: list[tuple[str, ...]]
    shown = [loss for loss in run["losses"] if loss["share"] >= LEAST_LOSS][:MOST_LOSSES]
    rest = run["losses"][len(shown) :]
    rows = [
        (
            loss["where"],
            loss["what"].removeprefix("layers.*."),
            human(loss["lost_s"], "s"),
            percent(loss["share"]),
            f"{loss['least_s'] / loss['seconds']:.0%}" if loss["least_s"] > 0 else "",
            loss["mend"],
        )
        for loss in shown
    ]
    if rest:
        lost_s = sum(loss["lost_s"] for loss in rest)
        share = percent(sum(loss["share"] for loss in rest))
        rows.append((f"{len(rest)} more", "", human(lost_s, "s"), share, "", ""))
    return rows
