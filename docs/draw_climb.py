"""README's picture: one `make demo`, drawn from its record: the plain loop, the engine's defaults,
what was tried with what was predicted of it, and the answer.

python docs/draw_climb.py > docs/climb.svg
"""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

RECORD = "results/optimize-demo-latency-neoverse-n1-2026-11-18-2.json"
SUBJECT = "a 135M model on two ARM cores, one request at a time, in short rounds that take turns"
TITLES = {"first-guess": "first guess: bf16, int8 weights and head"}
LEFT, RIGHT, ROW, TOP, WIDTH = 300, 690, 34, 96, 860
NOT_KEPT = 1.0  # the interval of what was kept lies above it


@dataclass(frozen=True)
class DrawnRow:
    title: str
    rate: float  # output tokens/s
    predicted: float | None = None  # output tokens/s
    colour: str = "#1f5fbf"
    verdict: str = "tokens/s"


def main() -> None:
    print(draw(json.loads((Path(__file__).parents[1] / RECORD).read_text())["records"]))


def draw(records: list[dict]) -> str:
    values = {
        record["name"].partition("-latency-")[2]: {
            name: value["value"] for name, value in record["values"].items()
        }
        for record in records
    }
    before, after, plain = (values.pop(name) for name in ("before", "after", "plain-loop"))
    first, last = before["output_tokens_per_s"], after["output_tokens_per_s"]
    guess = values["first-guess"]
    rows = [
        DrawnRow("the plain loop", plain["rate"], colour="#999"),
        DrawnRow("the engine's defaults", guess["rate"] / guess["speedup"], colour="#555"),
        *(tried(name, each) for name, each in values.items()),
        DrawnRow("whole workload: the defaults", first, colour="#555"),
        DrawnRow("whole workload: the answer", last),
    ]
    over_defaults = round(last, 1) / round(first, 1)  # as a reader divides them
    ratios = f"{over_defaults:.2f}× the defaults, {plain['answer_over_it']:.2f}× the plain loop"
    headline = f"{last:.1f} tokens/s instead of {first:.1f}: {ratios}"
    scale = (RIGHT - LEFT) / (1.08 * max(max(row.rate, row.predicted or 0.0) for row in rows))
    parts = [
        text(24, 34, headline, "font-size='20' font-weight='bold'"),
        text(24, 58, f"make demo: {SUBJECT}", "font-size='12' fill='#555'"),
        *axis(len(rows), scale),
    ]
    for number, row in enumerate(rows):
        parts += drawn(row, TOP + number * ROW, scale)
    height = TOP + len(rows) * ROW + 44
    parts += legend(height - 18, has_not_kept=any(row.colour == "none" for row in rows))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="13">\n<title>{headline}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>'
    )


def tried(name: str, values: dict[str, float]) -> DrawnRow:
    """Against the best so far: the defaults, or what was kept before."""
    start = values["rate"] / values["speedup"]
    kept = values["speedup_low"] > NOT_KEPT
    return DrawnRow(
        TITLES.get(name, name),
        values["rate"],
        start * values["predicted"],
        "#1f5fbf" if kept else "none",
        "tokens/s, kept" if kept else "not kept",
    )


def axis(num_rows: int, scale: float) -> list[str]:
    bottom, lines = TOP + num_rows * ROW, []
    step = 10
    for rate in range(0, int((RIGHT - LEFT) / scale) + 1, step):
        x = LEFT + rate * scale
        lines.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        lines.append(text(x, TOP - 8, str(rate), "font-size='11' fill='#555' text-anchor='middle'"))
    return lines


def drawn(row: DrawnRow, y: float, scale: float) -> list[str]:
    ink = "#777" if row.colour == "none" else "#111"
    stroke = "#777" if row.colour == "none" else row.colour
    parts = [text(24, y + 20, row.title, f"fill='{ink}'")]
    if row.predicted is not None:
        dashes = "fill='none' stroke='#c2651a' stroke-dasharray='3 2'"
        parts.append(bar(LEFT, row.predicted * scale, y + 4, dashes))
    style = f"fill='{row.colour}' stroke='{stroke}'"
    parts.append(bar(LEFT, row.rate * scale, y + (16 if row.predicted else 10), style))
    parts.append(text(RIGHT + 24, y + 20, f"{row.rate:.1f}", f"font-weight='bold' fill='{ink}'"))
    parts.append(text(RIGHT + 64, y + 20, row.verdict, f"fill='{ink}'"))
    return parts


def bar(x: float, width: float, y: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="9" {style}/>'


def legend(y: float, has_not_kept: bool) -> list[str]:
    parts = [
        bar(LEFT, 24, y - 8, "fill='none' stroke='#c2651a' stroke-dasharray='3 2'"),
        text(LEFT + 32, y, "predicted", "font-size='11' fill='#555'"),
        bar(LEFT + 110, 24, y - 8, "fill='#1f5fbf' stroke='#1f5fbf'"),
        text(LEFT + 142, y, "measured", "font-size='11' fill='#555'"),
    ]
    if has_not_kept:
        parts.append(bar(LEFT + 220, 24, y - 8, "fill='none' stroke='#777'"))
        parts.append(text(LEFT + 252, y, "measured, not kept", "font-size='11' fill='#555'"))
    return parts


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
