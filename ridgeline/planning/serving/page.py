"""The answer of `plan --for serve` as a page, one HTML file that needs no network: the frontier
with how sure it is, latencies and goodput by load, memory of a GPU, other fleets, and why not
another option.

    write_serving_page(document, Path("plans") / "plan.html")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human_bytes
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Interval,
    Markup,
    Section,
    Series,
    curves,
    element,
    intervals,
    page,
    stacked_bars,
    table,
)
from ridgeline.version import __version__

Document = Mapping[str, Any]
MOST_SERIES = 6  # of one picture


def write_serving_page(document: Document, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    with atomic_write(path) as file:
        file.write(serving_page(document))


def serving_page(document: Document) -> str:
    best, sure = document["best"], document["sure"]
    note = (
        f"TPOT ±{sure['tpot']:.0%}, TTFT ±{sure['ttft']:.0%}, tokens/s ±{sure['throughput']:.0%}: "
        f"{sure['basis']}."
    )
    sections = []
    if document["frontier"]:
        sections.append(Section("frontier", "What a GPU gives, and each user", _frontier(document),
                                note))  # fmt: skip
    sections += [
        Section("load", "Under more and less load", _load(document), best["option"]),
        Section("memory", "Memory of a GPU", _memory(best)),
    ]
    if document["fleets"]:
        sections.append(Section("fleets", "Other fleets", _fleets(document)))
    if document["why_not"]:
        sections.append(Section("rejected", "Why not another option", _rejected(document)))
    if document["command"]:
        run = element("pre", element("code", document["command"]))
        sections.append(Section("run", "Run it", run))
    facts = f"{document['cluster']}; {_workload(document['workload'])}"
    return page(
        f"Plan of {document['model']} · Ridgeline",
        element("b", document["model"]),
        "Plan for serving",
        _headline(document),
        sections,
        lead=element("p", facts, class_="facts"),
        footer=f"Planned by Ridgeline {__version__}",
    )


def _headline(document: Document) -> str:
    best, most = document["best"], document["most"]
    if not document["met"]:
        return f"The service level is not met: {document['closest']}."
    text = (
        f"{best['option']}: TTFT {1e3 * best['ttft']['p50']:.0f} ms and TPOT "
        f"{1e3 * best['tpot']['p50']:.1f} ms at the median"
    )
    if most["load"] > best["load"]:
        text += (
            f"; up to {most['load']:.3g} times this load, {most['requests_per_s']:.1f} requests/s"
        )
    return text + "."


def _workload(workload: Document) -> str:
    return (
        f"{workload['requests']:,} requests in {workload['duration_s']:.0f} s, "
        f"{workload['mean_prompt_tokens']:.0f} tokens in and {workload['mean_output_tokens']:.0f} "
        f"out in the mean ({workload['name']})"
    )


def _frontier(document: Document) -> Markup:
    rows, sure = document["frontier"], document["sure"]["throughput"]
    options = list(dict.fromkeys(row["option"] for row in rows))
    lines = [
        Series(
            option,
            [
                (round(row["tokens_per_s_per_user"]), row["tokens_per_s_per_gpu"])
                for row in sorted(rows, key=lambda row: float(row["tokens_per_s_per_user"]))
                if row["option"] == option
            ],
            number,
        )
        for number, option in enumerate(options[:MOST_SERIES])
    ]
    drawn = [
        Interval(
            f"{row['load']:.3g}x",
            row["tokens_per_s_per_gpu"],
            row["tokens_per_s_per_gpu"] * (1 - sure),
            row["tokens_per_s_per_gpu"] * (1 + sure),
            f"{row['option']}; {row['tokens_per_s_per_user']:,.0f} tokens/s/user",
        )
        for row in rows
    ]
    names = ("tokens/s/user", "tokens/s/GPU")
    return curves(lines, "Frontier", *names, read=_figure) + intervals(
        drawn, "tokens/s/GPU", read=_figure, ends_name="expected"
    )


def _load(document: Document) -> Markup:
    points = _best_curve(document)

    def line(name: str, number: int, *keys: str) -> Series:
        values = []
        for point in points:
            value: Any = point
            for key in keys:
                value = value[key]
            values.append((round(point["requests_per_s"], 1), 1e3 * value))
        return Series(name, values, number)

    first = [line("p50", 0, "ttft", "p50"), line("p99", 1, "ttft", "p99")]
    each = [line("p50", 0, "tpot", "p50"), line("p99", 1, "tpot", "p99")]
    drawn = curves(first, "Time to first token", "requests/s", "ms")
    drawn += curves(each, "Time per output token", "requests/s", "ms")
    if points[0]["goodput"] is not None:
        good = [(round(point["requests_per_s"], 1), 100 * point["goodput"]) for point in points]
        title = "Requests that keep the service level"
        drawn += curves([Series("goodput", good, 2)], title, "requests/s", "%")
    return drawn


def _best_curve(document: Document) -> list[Document]:
    own = [one for one in document["curves"] if one["option"] == document["best"]["option"]]
    return sorted(own, key=lambda point: float(point["load"]))


def _memory(best: Document) -> Markup:
    parts = [BarPart(name, value, "") for name, value in best["memory"].items() if value]
    note = element(
        "p",
        f"{human_bytes(best['free_bytes'])} of a GPU are free; {best['kv_tokens']:,} tokens of "
        "keys and values a replica.",
        class_="intro",
    )
    bars = [Bar("each GPU", parts)]
    return note + stacked_bars(bars, lambda value: human_bytes(int(value)), whole="in all")


def _fleets(document: Document) -> Markup:
    names = ("TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "good", "GPU-hours")
    columns = (Column("fleet"), *(Column(name, is_number=True) for name in names))
    rows = [
        (
            f"{each['kind']}: {each['words']}",
            f"{1e3 * each['ttft']['p50']:.0f}",
            f"{1e3 * each['ttft']['p99']:.0f}",
            f"{1e3 * each['tpot']['p50']:.1f}",
            f"{1e3 * each['tpot']['p99']:.1f}",
            "–" if each["goodput"] is None else f"{each['goodput']:.0%}",
            f"{each['gpu_hours']:.3g}",
        )
        for each in document["fleets"]
    ]
    return table(columns, rows, "Fleets")


def _rejected(document: Document) -> Markup:
    columns = (Column("option"), Column("why not"), Column("what does"))
    rows = [(one["option"], one["constraint"], one["remedy"]) for one in document["why_not"]]
    return table(columns, rows, "Rejected")


def _figure(value: float) -> str:
    return f"{value:,.0f}"
