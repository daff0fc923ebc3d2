"""A profile as a page: one HTML file that needs no network, drawn from the document.

write_page(document, Path("profile.html"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human, percent
from ridgeline.profiling.collective_rows import collectives_figure, waiting_sentence
from ridgeline.profiling.document import PARTS, TRAINING_PARTS
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Dot,
    Markup,
    Roofs,
    Section,
    element,
    join,
    page,
    roofline,
    stacked_bars,
    table,
)
from ridgeline.profiling.gap_words import gap_rows, gap_sentence
from ridgeline.profiling.predicting.prediction import GapPart
from ridgeline.profiling.run_rows import TEXTS, RunTable, run_sentence, run_tables

COLUMNS = (
    Column("op"),
    Column("time", is_number=True),
    Column("of the step", is_number=True),
    Column("bytes", is_number=True),
    Column("FLOPs", is_number=True),
    Column("achieved", is_number=True),
    Column("of the ceiling", is_number=True),
    Column("verdict"),
)
ADVICE = (
    Column("change"),
    Column("predicted gain", is_number=True),
    Column("likely", is_number=True),
    Column("why"),
)
WAITS = {"copies": "copies", "gaps": "launch gap", "host": "host"}  # and their verdicts
ProfileDocument = Mapping[str, Any]


def write_page(document: ProfileDocument, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    with atomic_write(path) as file:
        file.write(profile_page(document))


def profile_page(document: ProfileDocument) -> str:
    steps = document["steps"]
    sections = [
        Section("where", "Where the time goes", _bars(steps), "The parts add up to the step."),
        Section("roofline", "Under the roofline", _roofline(document)),
        *(
            Section(key, step["label"], _ops(step))
            for key, step in zip(_keys(steps), steps, strict=True)
        ),
    ]
    for step in steps:
        waits = step.get("communication")
        if waits is not None:
            figure = collectives_figure(waits["collectives"], waits["measured_step_s"])
            words = _capitalized(waiting_sentence(waits)) + "; means over the ranks."
            sections.append(Section("communication", "Communication", figure, words))
    if document["gap"]:
        sections.insert(1, _gap(document))
    if "run" in document:
        sections = [*map(_of_run, run_tables(document["run"])), *sections]
    if document["next"]:
        sections.append(Section("next", "What next", _next(document["next"]), document["assumed"]))
    name = document["model"]
    return page(
        f"Profile of {name} · Ridgeline",
        join([element("b", name), f" on {document['device']}"]),
        f"{document['loop']} · {document['form']}",
        run_sentence(document["run"])
        if "run" in document
        else _capitalized("; ".join(step["sentence"] for step in steps)) + ".",
        sections,
        lead=_notes(document["notes"]),
        footer=f"Measured {document['created']} by Ridgeline {document['version']}",
    )


def _keys(steps: Sequence[ProfileDocument]) -> list[str]:
    """The phase; with a letter where there are several steps of it."""
    phases = [step["phase"] for step in steps]
    if len(set(phases)) == len(phases):
        return phases
    return [f"{phase}-{letter}" for phase, letter in zip(phases, ascii_lowercase, strict=False)]


def _gap(document: ProfileDocument) -> Section:
    parts = gap_of(document)
    rows = gap_rows(parts, on_cpu=document["device_type"] == "cpu")
    body = stacked_bars([Bar("time in steps", rows)], percent, are_shares=True)
    return Section("gap", "Why it is not 100%", body, gap_sentence(parts))


def gap_of(document: ProfileDocument) -> list[GapPart]:
    return [GapPart(**part) for part in document["gap"]]


def _of_run(each: RunTable) -> Section:
    columns = [Column(name, is_number=name not in TEXTS) for name in each.headings]
    return Section(each.key, each.title, table(columns, each.rows, each.title), each.words)


def _notes(notes: Sequence[str]) -> Markup | str:
    return element("ul", *(element("li", note) for note in notes), class_="notes") if notes else ""


def _bars(steps: Sequence[ProfileDocument]) -> Markup:
    """Of a training step also what was predicted of it."""
    meanings = TRAINING_PARTS if steps[0]["phase"] == "training" else PARTS
    named = "label" if len({step["phase"] for step in steps}) == len(steps) else "name"
    bars = {step[named]: step["totals"] for step in steps}
    for step in steps:
        if step.get("predicted_totals"):
            bars = {"measured": step["totals"], "predicted": step["predicted_totals"]}
    taken = {name: text for name, text in meanings.items() if any(b[name] for b in bars.values())}
    return stacked_bars(
        [
            Bar(label, [BarPart(name, totals[name], text) for name, text in taken.items()])
            for label, totals in bars.items()
        ],
        lambda seconds: human(seconds, "s"),
        whole="the step",
        are_shares=True,
    )


def _roofline(document: ProfileDocument) -> Markup:
    dots = [
        Dot(
            row["op"] if step["phase"] == "training" else f"{row['op']} ({step['name']})",
            row["flops"] / row["bytes"],
            row["flops_per_s"],
            f"{share_text(row['share_of_ceiling'])} of the ceiling, {row['share']:.0%} of the step",
            series=number % 6,
            weight=min(1.0, row["share"]),
        )
        for number, step in enumerate(document["steps"])
        for row in step["rows"]
        if row["flops"] and row["bytes"] and row["flops_per_s"]
    ]
    return roofline(dots, _roofs(document["ceilings"]))


def _roofs(ceilings: ProfileDocument) -> Roofs | None:
    memory = ceilings.get("read_bandwidth") or ceilings.get("memory_bandwidth")
    rates = {
        key.removeprefix("matrix_"): value["value"]
        for key, value in ceilings.items()
        if key.startswith("matrix_")
    }
    if memory is None or not rates:
        return None
    source = "measured here" if memory["source"] == "measured" else "from the datasheet"
    return Roofs(memory["value"], rates, source)


def _ops(step: ProfileDocument) -> Markup:
    rows = [_op_cells(row) for row in step["rows"]]
    for name, verdict in WAITS.items():
        seconds = step["totals"].get(name, 0.0)
        if seconds > 0:
            share = f"{seconds / step['step_s']:.1%}"
            rows.append((name, human(seconds, "s"), share, "", "", "", "", verdict))
    columns: tuple[Column, ...] = COLUMNS
    if step.get("predicted_s") is not None:
        columns = (*COLUMNS[:2], Column("predicted", is_number=True), *COLUMNS[2:])
        expected = {row["op"]: row["predicted_s"] for row in step["rows"]}
        expected |= {name: step["predicted_totals"].get(name) for name in WAITS}
        rows = [(*row[:2], seconds_text(expected.get(row[0])), *row[2:]) for row in rows]
    return table(columns, rows, step["label"])


def seconds_text(seconds: float | None) -> str:
    return human(seconds, "s") if seconds else ""


def _op_cells(row: ProfileDocument) -> tuple[str, ...]:
    return (
        row["op"],
        human(row["seconds"], "s"),
        f"{row['share']:.1%}",
        human(row["bytes"], "B") if row["bytes"] else "",
        human(row["flops"], "FLOP") if row["flops"] else "",
        achieved_text(row),
        share_text(row["share_of_ceiling"]),
        row["verdict"],
    )


def achieved_text(row: ProfileDocument) -> str:
    """By what bounds it: bytes or FLOPs a second."""
    if row["bytes_per_s"] is None:
        return ""
    if row["verdict"] == "compute" and row["flops_per_s"]:
        return human(row["flops_per_s"], "FLOP/s")
    return human(row["bytes_per_s"], "B/s")


def share_text(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _next(advice: Sequence[ProfileDocument]) -> Markup:
    rows = [
        (
            join([each["title"], " ", element("code", each["flags"]) if each["flags"] else None]),
            f"{each['speedup']:.2f}x",
            f"{each['low']:.2f}x to {each['high']:.2f}x",
            each["why"],
        )
        for each in advice
    ]
    return table(ADVICE, rows, "What to change next")


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
