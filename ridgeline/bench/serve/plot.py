"""`bench serve --plot FILE.html`: how latencies are distributed, and how the share of requests
within the bound falls with the rate. One panel a figure, one line an endpoint, in one HTML file.

    draw(Path("serve.html"), {"http://127.0.0.1:8000": run}, {}, bound)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.measure import ServeRun
from ridgeline.bench.serve.search import HighestRate
from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.profiling.drawing import Markup, Section, Series, curves, join, page
from ridgeline.profiling.drawing.scales import Scale

PANELS = {
    "first_token": "Time to first token",
    "per_output_token": "Time per output token",
    "between_events": "Between events of a stream",
    "request": "Whole request",
}
SHARES = (0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99, 1.0)
SHARE_AXIS = Scale(0.0, 1.02)


def check_plot(path: Path) -> None:
    """Before anything is measured."""
    if path.suffix != ".html":
        raise UsageError(f"--plot is {str(path)!r}; give a file name that ends with .html")


def draw(
    path: Path, runs: Mapping[str, ServeRun], rates: Mapping[str, HighestRate], bound: LatencyBound
) -> None:
    limits = {"first_token": bound.ttft_s, "per_output_token": bound.tpot_s}
    panels = [
        _distribution(
            title, {url: run.samples[name] for url, run in runs.items()}, limits.get(name)
        )
        for name, title in PANELS.items()
    ]
    sections = [Section("latency", "Latency", join(panels))]
    if rates:
        sections.append(Section("rates", "Requests within the bound", _rates(rates)))
    urls = ", ".join(runs)
    text = page(f"bench serve: {urls}", urls, "bench serve", "Latency under load", sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text)


def _distribution(title: str, samples: Mapping[str, list[float]], limit_s: float | None) -> Markup:
    """The share of requests that took at most so long."""
    series = [
        Series(url, _shares(seconds), series=number)
        for number, (url, seconds) in enumerate(samples.items())
    ]
    if limit_s is not None:
        ends = ((1e3 * limit_s, SHARES[0]), (1e3 * limit_s, 1.0))
        series.append(Series(f"bound, {1e3 * limit_s:g} ms", ends, series=5, hollow=True))
    return curves(
        series, title, "ms", "share of requests at most as long", read=_percent, y_scale=SHARE_AXIS
    )


def _shares(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Milliseconds at each of SHARES."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return [(1e3 * ordered[round(share * last)], share) for share in SHARES] if ordered else []


def _rates(rates: Mapping[str, HighestRate]) -> Markup:
    series = []
    for number, (url, result) in enumerate(rates.items()):
        tried = sorted((probe.rate, probe.share.value) for probe in result.tried)
        name = url if result.met is None else f"{url}, met at {result.met.rate:.3g}/s"
        series.append(Series(name, tried, series=number))
    every = [probe.rate for result in rates.values() for probe in result.tried]
    target = next(iter(rates.values())).target
    if every:
        ends = ((min(every), target), (max(every), target))
        series.append(Series(f"asked for, {_percent(target)}", ends, series=5, hollow=True))
    return curves(
        series, "Share within the bound", "requests/s", "", read=_percent, y_scale=SHARE_AXIS
    )


def _percent(share: float) -> str:
    return f"{share:.0%}"
