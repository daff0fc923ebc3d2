"""A study as a page: the best trial beside the user's own settings, how trials went on from rung to
rung, what each setting does to the loss, and every trial.

    write_search_page(Path("study"), document, "tiny on book.txt")     # study/report.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Markup,
    Section,
    Series,
    curves,
    element,
    join,
    page,
    stacked_bars,
    table,
)
from ridgeline.progress import clock_words
from ridgeline.tuning.pages.axes import loss_scale, rounded
from ridgeline.version import __version__

FILE_NAME = "report.html"
MOST_CURVES, MOST_ROWS = 6, 200
TOGETHER = "together"


def write_search_page(folder: Path, document: Mapping[str, Any], subject: str) -> Path:
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        file.write(search_page(document, subject))
    return path


def search_page(document: Mapping[str, Any], subject: str) -> str:
    sections = [
        Section("curves", "From rung to rung", _curves(document), _curves_intro(document)),
        Section("settings", "What each setting does", _responses(document)),
        Section("trials", "Trials", _trials(document)),
    ]
    return page(
        f"Search for {subject} · Ridgeline",
        element("b", subject),
        "Search",
        headline(document),
        sections,
        lead=element("p", lead(document)),
        footer=f"Drawn from journal.jsonl by Ridgeline {__version__}",
    )


def headline(document: Mapping[str, Any]) -> str:
    """The best settings and what they gain over the user's own; or what was made of them since."""
    if document.get("answer"):
        return str(document["answer"])
    best, first, measure = document["best"], document["first"], document["measure"]
    if best is None:
        return "No trial has come to its end."
    text = f"{point_words(best['point'])}: {measure} {loss_words(best['losses'][-1])}"
    if first is None or first["number"] == best["number"]:
        return text + (", your own settings." if first is not None else ".")
    if len(first["losses"]) == len(best["losses"]) and first["losses"][-1] is not None:
        return f"{text}, with your own settings {loss_words(first['losses'][-1])}."
    return f"{text}; your own settings were stopped early."


def lead(document: Mapping[str, Any]) -> str:
    """What was done, and what was given up."""
    parts = [
        f"{len(document['trials'])} trials, {document['num_whole']} of them to their end, with the "
        f"work of {document['used_runs']:.1f} whole runs ({clock_words(document['seconds'])} "
        "minutes of trials)."
    ]
    if document["num_diverged"]:
        parts.append(f"{document['num_diverged']} diverged and were given up.")
    if document["num_failed"]:
        parts.append(f"{document['num_failed']} could not be run.")
    if document["edges"]:
        parts.append(
            f"The best lies at the end of the range of {', '.join(document['edges'])}: it may lie "
            "beyond."
        )
    parts.append(document.get("note", ""))
    return " ".join(filter(None, parts))


def point_words(point: Mapping[str, Any]) -> str:
    """`lr 0.001, batch 8`."""
    return ", ".join(f"{name} {value_words(value)}" for name, value in point.items())


def value_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def loss_words(loss: float | None) -> str:
    return "no number" if loss is None else f"{loss:.4f}"


def _curves_intro(document: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{100 * share:.3g}%" for share in document["shares"])
    return f"Trials are judged after {shares} of a run; the better ones go on."


def _curves(document: Mapping[str, Any]) -> Markup:
    """The best trials, and the user's own settings."""
    whole = [each for each in document["trials"] if each["losses"] and not each["problem"]]
    whole.sort(key=lambda each: (-len(each["losses"]), each["losses"][-1]))
    first = document["first"]
    chosen = whole[:MOST_CURVES]
    if first is not None and first["losses"] and first not in chosen:
        chosen = [*chosen[: MOST_CURVES - 1], first]
    series = [
        Series(
            f"#{each['number']} {point_words(each['point'])}",
            [
                (rounded(100 * share), loss)
                for share, loss in zip(document["shares"], each["losses"], strict=False)
                if loss is not None
            ],
            series=index,
            hollow=first is not None and each["number"] == first["number"],
        )
        for index, each in enumerate(chosen)
    ]
    scale = loss_scale(loss for line in series for _, loss in line.points)
    return curves(
        series, "The best trials", "% of a run", document["measure"], read=loss_words,
        y_scale=scale,
    )  # fmt: skip


def _responses(document: Mapping[str, Any]) -> Markup:
    importance = document["importance"]
    if not importance:
        return element("p", "Too few trials to tell.", class_="soft")
    rest = max(0.0, 1.0 - sum(importance.values()))
    parts = [
        BarPart(name, share, "share of the variance over the space that it explains alone")
        for name, share in sorted(importance.items(), key=lambda each: -each[1])
    ]
    parts.append(BarPart(TOGETHER, rest, "what settings do with each other"))
    figures = [stacked_bars([Bar("importance", parts)], lambda share: f"{share:.0%}")]
    measure = document["measure"]
    for name, values in document["responses"].items():
        numbers = [(rounded(value), loss) for value, loss in values if _is_positive(value)]
        if len(numbers) == len(values) and len(values) > 1:
            line = Series("expected, in the mean over all other settings", numbers)
            scale = loss_scale(loss for _, loss in numbers)
            figures.append(curves([line], name, name, measure, read=loss_words, y_scale=scale))
        else:
            rows = [(value_words(value), loss_words(loss)) for value, loss in values]
            columns = (Column(name), Column(f"expected {measure}", is_number=True))
            figures.append(table(columns, rows, f"Expected by {name}", shows_caption=True))
    return join(figures)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _trials(document: Mapping[str, Any]) -> Markup:
    shares = document["shares"]
    columns = [
        Column("trial"),
        Column("settings"),
        *(Column(f"at {100 * share:.3g}%", is_number=True) for share in shares),
        Column("expected", is_number=True),
        Column(""),
    ]
    rows = [_row(each, len(shares), document) for each in ranked(document)[:MOST_ROWS]]
    return table(columns, rows, "Trials, the best first")


def ranked(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The best first: those that came furthest, by their loss; what was given up last."""
    return sorted(
        document["trials"],
        key=lambda each: (
            each["problem"] is not None,
            -len(each["losses"]),
            (each["losses"] or [0.0])[-1] or 0.0,
        ),
    )


def _row(trial: Mapping[str, Any], num_rungs: int, document: Mapping[str, Any]) -> list[str]:
    losses = [loss_words(loss) for loss in trial["losses"]]
    losses += ["–"] * (num_rungs - len(losses))
    expected = "–" if trial["expected"] is None else loss_words(trial["expected"])
    remark = trial["problem"] or ""
    if trial["diverged"]:
        remark = f"diverged: {remark}"
    if document["best"] is not None and trial["number"] == document["best"]["number"]:
        remark = "best"
    return [f"#{trial['number']}", point_words(trial["point"]), *losses, expected, remark]
