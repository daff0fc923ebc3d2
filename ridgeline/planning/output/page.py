"""A plan as a page, one HTML file that needs no network: how sure it is, where a step's time goes,
memory of the stages, the pipeline over time, fewer GPUs, and why not another layout.

    write_plan_page(document, Path("plans") / "plan.html", "ridgeline train …")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human, human_bytes
from ridgeline.planning.output.document import shown_devices
from ridgeline.planning.training.step import WORDS
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Interval,
    Markup,
    Section,
    element,
    intervals,
    join,
    page,
    stacked_bars,
    table,
)
from ridgeline.version import __version__

ROW, GAP = 16, 4  # pixels of a device's row in the timeline
KINDS = {"F": ("forward", "p0"), "B": ("backward", "p1"), "I": ("inputs' gradients", "p1"),
         "W": ("weights' gradients", "p3")}  # fmt: skip
SENT = ("tensor", "context", "expert", "shard", "replicate", "pipeline", "nodes")
Document = Mapping[str, Any]


def write_plan_page(document: Document, path: Path, command: str) -> None:
    """Whole or not at all; OutputError where the file cannot be written. `command` runs plan 1."""
    with atomic_write(path) as file:
        file.write(plan_page(document, command))


def plan_page(document: Document, command: str) -> str:
    best, basis = document["plans"][0], document["basis"]
    sections = [
        Section("plans", "Plans", _plans(document), f"{basis[:1].upper()}{basis[1:]}."),
        Section("time", "Where a step's time goes", _time(best)),
        Section("communication", "What ranks send", _sent(best)),
        Section("memory", "Memory of the stages", _memory(best, document["usable_bytes"])),
    ]
    if best["timeline"]:
        sections.append(Section("pipeline", "The pipeline", _timeline(best)))
    if best["days"] is not None:
        sections.append(Section("cost", "What the run costs", _run(document, best)))
    if len(document["frontier"]) > 1:
        sections.append(Section("frontier", "Fewer GPUs, or another pool", _frontier(document)))
    if document["why_nots"]:
        sections.append(Section("why-not", "Why not otherwise", _why_nots(document)))
    if document["rejected"]:
        sections.append(Section("rejected", "Faster by their products, and out of memory",
                                _rejected(document)))  # fmt: skip
    sections.append(Section("run", "Run it", element("pre", element("code", command))))
    return page(
        f"Plan of {document['model']} · Ridgeline",
        element("b", document["model"]),
        "Plan for training",
        _headline(document, best),
        sections,
        lead=element("p", document["cluster"], class_="facts"),
        footer=f"Planned by Ridgeline {__version__}",
    )


def _headline(document: Document, best: Document) -> str:
    text = (
        f"{_figure(best['tokens_per_s']['value'])} tokens/s, {best['mfu']['value']:.0%} MFU, "
        f"±{document['error']:.0%}"
    )
    if best["days"] is not None:
        text += f"; {best['days']['value']:,.1f} days"
    if best["cost"] is not None:
        text += f", {_figure(best['cost']['value'])} in the currency of the prices"
    return text + "."


def _figure(value: float) -> str:
    return f"{value:,.0f}"


def _plans(document: Document) -> Markup:
    rows = [
        Interval(
            f"{plan['number']}", plan["tokens_per_s"]["value"], plan["tokens_per_s"]["low"],
            plan["tokens_per_s"]["high"],
            setting_words(plan),
        )
        for plan in document["plans"]
    ]  # fmt: skip
    return intervals(rows, "tokens/s", read=_figure, ends_name="expected")


def _time(best: Document) -> Markup:
    parts = [
        BarPart(name, value, WORDS[name]) for name, value in best["parts"].items() if value > 0
    ]
    return stacked_bars([Bar("a step", parts)], lambda value: human(value, "s"), whole="in all")


def _sent(best: Document) -> Markup:
    step_s = sum(best["parts"].values())
    rows = [
        (name, human(best["parts"][name], "s"), f"{best['parts'][name] / step_s:.1%}", WORDS[name])
        for name in SENT
        if best["parts"][name] > 0
    ]
    if not rows:
        return element("p", "One device: nothing is sent.", class_="soft")
    columns = (Column("over"), Column("a step", is_number=True),
               Column("of it", is_number=True), Column(""))  # fmt: skip
    return table(columns, rows, "What ranks send and wait for")


def _memory(best: Document, usable: int) -> Markup:
    stages = best["stages"]
    bars = [
        Bar(
            f"device {number}" if len(stages) > 1 else "each GPU",
            [BarPart(i["name"], i["num_bytes"], i["meaning"]) for i in stages[number]["items"]],
        )
        for number in shown_devices(len(stages))
    ]
    note = element("p", f"{human_bytes(usable)} of a GPU are there for it.", class_="intro")
    return note + stacked_bars(bars, lambda value: human_bytes(int(value)), whole="in all")


def _timeline(best: Document) -> Markup:
    """Passes of some devices, from left to right."""
    passes = best["timeline"]
    span = max(each["end"] for each in passes)
    devices = sorted({each["device"] for each in passes})
    rows = {device: index for index, device in enumerate(devices)}
    drawn = [_row(rows[device], device) for device in devices]
    drawn += [_pass(each, rows[each["device"]], span) for each in passes]
    height = len(devices) * (ROW + GAP)
    label = f"passes of {len(devices)} devices over {human(span, 's')}"
    figure = element("svg", *drawn, class_="plot", height=height, role="img", aria_label=label)
    kinds = dict.fromkeys(each["kind"] for each in passes)
    legend = element("ul", *(_kind(kind) for kind in kinds), class_="legend")
    note = element(
        "p", f"The first micro-batches of {best['num_micro']} of a step, on {len(devices)} devices "
        "of the pipeline.", class_="intro",
    )  # fmt: skip
    return note + element("figure", legend, figure)


def _row(index: int, device: int) -> Markup:
    y = index * (ROW + GAP)
    ground = element("rect", class_="rest", x=0, y=y, width="100%", height=ROW)
    return ground + element("text", str(device), class_="tick end", x=-8, y=y + ROW - 4)


def _pass(each: Document, index: int, span: float) -> Markup:
    name, look = KINDS[each["kind"]]
    text = f"{name} of micro-batch {each['micro']} through stage {each['stage']}"
    return element(
        "rect", element("title", text), class_=f"part {look}",
        x=f"{100 * each['begin'] / span:.3f}%", y=index * (ROW + GAP),
        width=f"{100 * (each['end'] - each['begin']) / span:.3f}%", height=ROW,
    )  # fmt: skip


def _kind(kind: str) -> Markup:
    name, look = KINDS[kind]
    square = element("rect", class_=f"part {look}", x=0.5, y=0.5, width=11, height=11, rx=2)
    return element("li", element("svg", square, class_="key", viewBox="0 0 12 12"), " ", name)


def _frontier(document: Document) -> Markup:
    """What a GPU gives, and with tokens the days and the money."""
    rows = document["frontier"]
    key = "days" if rows[0]["days"] is not None else "tokens_per_s_gpu"
    title = {"days": "days", "tokens_per_s_gpu": "tokens/s of a GPU"}[key]
    drawn = [
        Interval(
            f"{row['num_gpus']:,} x {row['gpu']}", row[key]["value"], row[key]["low"],
            row[key]["high"], _cost(row),
        )
        for row in rows
    ]  # fmt: skip
    return intervals(drawn, title, read=lambda value: f"{value:,.1f}", ends_name="expected")


def _run(document: Document, best: Document) -> Markup:
    """Days, energy and, with prices, money."""
    kinds = (("days", "days", "{:,.1f}"), ("energy_mwh", "energy, MWh", "{:,.0f}"),
             ("cost", "money, in the currency of the prices", "{:,.0f}"))  # fmt: skip
    rows = [
        (name, *(form.format(best[key][end]) for end in ("value", "low", "high")))
        for key, name, form in kinds
        if best[key] is not None
    ]
    columns = (Column(""), *(Column(name, is_number=True) for name in ("planned", "least", "most")))
    return table(columns, rows, f"The run of {document['tokens']:,.0f} tokens")


def _cost(row: Document) -> str:
    words = f"{row['mfu']['value']:.0%} MFU, {row['layout_words'].replace(',', ', ')}"
    if row["cost"] is not None:
        words += f", costs {_figure(row['cost']['value'])}"
    return words


def _why_nots(document: Document) -> Markup:
    columns = (Column("why not"), Column("a step", is_number=True), Column("because"),
               Column("the best such setting"))  # fmt: skip
    rows = [
        (
            each["question"],
            "no room" if each["slower"] is None else f"{each['slower']:+.0%}",
            each["reason"] + (f"; fits with {each['remedy']}" if each["remedy"] else ""),
            setting_words(each),
        )
        for each in document["why_nots"]
    ]
    return table(columns, rows, "What else was asked, and planned")


def setting_words(each: Document) -> str:
    return (
        f"{each['layout_words'].replace(',', ', ')}; micro-batch {each['micro_batch']}, "
        f"recomputation {each['recomputation']}"
    )


def _rejected(document: Document) -> Markup:
    columns = (Column("layout"), Column("why not"), Column("what fits"))
    rows: Sequence[tuple[str, str, str]] = [
        (
            setting_words(each),
            each["reason"],
            each["remedy"],
        )
        for each in document["rejected"]
    ]
    counts = [
        element("li", f"{count:,} settings: {reason}")
        for reason, count in document["reasons"].items()
    ]
    return table(columns, rows, "Rejected") + element("ul", join(counts), class_="notes")
