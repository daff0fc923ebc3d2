"""Pictures of `bench serve`: how latencies are distributed, and how the share within the bound
falls with the rate. One panel a figure, one line an endpoint.

    draw(Path("serve.png"), {"http://127.0.0.1:8000": run}, {}, bound)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.measure import ServeRun
from ridgeline.bench.serve.search import HighestRate
from ridgeline.errors import MissingPackageError, UsageError

PANELS = {
    "first_token": "time to first token",
    "per_output_token": "time per output token",
    "between_events": "between events of a stream",
    "request": "whole request",
}
SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#1f6f8b", "#d1495b", "#66862f", "#8a5a9e", "#c77b1e", "#4d4d4d")


def check_plot(path: Path) -> None:
    """Before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot is {str(path)!r}; its name ends with {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError(
            "--plot needs the package matplotlib; try: pip install 'ridgeline[plots]'"
        )


def draw(
    path: Path, runs: Mapping[str, ServeRun], found: Mapping[str, HighestRate], bound: LatencyBound
) -> None:
    from matplotlib.figure import Figure

    num = len(PANELS) + bool(found)
    figure = Figure(figsize=(10, 3.2 * -(-num // 2)), layout="constrained")
    axes = figure.subplots(-(-num // 2), 2).flatten()
    for axis, (name, title) in zip(axes, PANELS.items(), strict=False):
        limit = {"first_token": bound.ttft_s, "per_output_token": bound.tpot_s}.get(name)
        _distribution(axis, title, {url: run.samples[name] for url, run in runs.items()}, limit)
    if found:
        _rates(axes[len(PANELS)], found)
    for axis in axes[num:]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plain(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _distribution(
    axis: Any, title: str, samples: Mapping[str, list[float]], limit: float | None
) -> None:
    """The share of requests that took at most so long."""
    _plain(axis, title)
    for colour, (url, seconds) in zip(_colours(), samples.items(), strict=False):
        times = 1e3 * np.sort(np.array(seconds))
        shares = np.arange(1, len(times) + 1) / max(len(times), 1)
        axis.step(times, shares, where="post", color=colour, label=url)
    if limit is not None:
        axis.axvline(1e3 * limit, color="0.5", linestyle="--", linewidth=1)
        axis.annotate("bound ", (1e3 * limit, 0.02), fontsize=8, color="0.4", ha="right")
    _logarithmic(axis, "ms")


def _logarithmic(axis: Any, label: str) -> None:
    """With numbers as people write them."""
    axis.set(xlabel=label, ylabel="share", ylim=(0, 1.02), xscale="log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(_few_numbers if high < 30 * low else "")
    axis.tick_params(axis="x", which="both", labelsize=8)


def _few_numbers(value: float, _: int) -> str:
    """2, 3 and 5 of every decade: the others would run into each other."""
    text = f"{value:g}"
    return text if text.strip("0.")[:1] in "235" else ""


def _rates(axis: Any, found: Mapping[str, HighestRate]) -> None:
    _plain(axis, "requests within the bound")
    for colour, each in zip(_colours(), found.values(), strict=False):
        rates = [tried.rate for tried in each.tried]
        shares = [tried.share.value for tried in each.tried]
        ends = [(tried.share.low or 0.0, tried.share.high or 1.0) for tried in each.tried]
        reach = [[s - low for s, (low, _) in zip(shares, ends, strict=True)]]
        reach += [[high - s for s, (_, high) in zip(shares, ends, strict=True)]]
        axis.errorbar(rates, shares, np.abs(reach), color=colour, marker="o", ms=3, capsize=2)
        if each.met is not None:
            axis.axvline(each.met.rate, color=colour, linestyle=":", linewidth=1)
            axis.annotate(f" {each.met.rate:.3g}/s", (each.met.rate, 0.04), color=colour)
        axis.axhline(each.target, color="0.5", linestyle="--", linewidth=1)
    _logarithmic(axis, "requests/s")


def _colours() -> list[str]:
    return list(COLOURS) * 4
