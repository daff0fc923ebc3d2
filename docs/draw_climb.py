"""README's picture: one `optimize` run, change by change, drawn from its record.

python docs/draw_climb.py > docs/climb.svg
"""

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

RECORD = "results/optimize-llama-3.1-8b-latency-nvidia-h200-2026-11-17.json"
COMMAND = "ridgeline optimize --shape llama-3.1-8b --for latency --quality off --budget 7m"
TITLES = {
    "fused": "fused kernels, paged KV cache",
    "graphs": "captured graphs",
    "bf16": "bf16",
    "overlap": "overlapped steps",
    "tuned": "tuned kernels",
    "int4-g128": "int4 weights, groups of 128",
    "head-int8": "int8 head",
    "copies": "16-bit copies for prompts",
    "kv-fp8": "fp8 KV cache",
}
LEFT, RIGHT, ROW, TOP, WIDTH = 250, 690, 30, 96, 860
LEAST, MOST = 40.0, 640.0  # tokens/s at the ends of the axis


@dataclass(frozen=True)
class Change:
    title: str
    predicted: float  # times faster
    low: float  # end of the 95% interval of what was measured, times faster
    rate: float  # output tokens/s

    @property
    def is_kept(self) -> bool:
        return self.low > 1


def main() -> None:
    print(draw(json.loads((Path(__file__).parents[1] / RECORD).read_text())["records"]))


def draw(records: list[dict]) -> str:
    before, after, *rungs = ({k: v["value"] for k, v in r["values"].items()} for r in records)
    names = [record["name"].partition("-latency-")[2] for record in records[2:]]
    changes = [
        Change(TITLES.get(name, name), r["predicted"], r["speedup_low"], r["rate"])
        for name, r in zip(names, rungs, strict=True)
    ]
    first, last = before["output_tokens_per_s"], after["output_tokens_per_s"]
    headline = f"{last:.0f} tokens/s instead of {first:.0f}: {last / first:.1f}× the speed"
    parts = [
        text(24, 34, headline, "font-size='20' font-weight='bold'"),
        text(
            24,
            58,
            COMMAND + ", one NVIDIA H200",
            "font-size='12' fill='#555'",
        ),
        *axis(len(changes)),
    ]
    start = first
    for number, change in enumerate(changes):
        parts += row(change, start, TOP + number * ROW)
        start = change.rate if change.is_kept else start
    height = TOP + len(changes) * ROW + 44
    parts += legend(height - 18)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="13">\n<title>{headline}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>'
    )


def place(rate: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(rate / LEAST) / math.log(MOST / LEAST)


def axis(num_rows: int) -> list[str]:
    bottom = TOP + num_rows * ROW
    lines = []
    for rate in (40, 80, 160, 320, 640):
        x = place(rate)
        lines.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        lines.append(text(x, TOP - 8, str(rate), "font-size='11' fill='#555' text-anchor='middle'"))
    return lines


def row(change: Change, start: float, y: float) -> list[str]:
    ink = "#111" if change.is_kept else "#777"
    fill = "#1f5fbf" if change.is_kept else "none"
    verdict = "tokens/s" if change.is_kept else "not kept"
    return [
        text(24, y + 19, change.title, f"fill='{ink}'"),
        bar(
            start,
            start * change.predicted,
            y + 4,
            "fill='none' stroke='#c2651a' stroke-dasharray='3 2'",
        ),
        bar(
            start,
            change.rate,
            y + 15,
            f"fill='{fill}' stroke='{fill if change.is_kept else ink}'",
        ),
        text(RIGHT + 24, y + 19, f"{change.rate:.0f}", f"font-weight='bold' fill='{ink}'"),
        text(RIGHT + 60, y + 19, verdict, f"fill='{ink}'"),
    ]


def bar(start: float, end: float, y: float, style: str) -> str:
    left, right = sorted((place(start), place(end)))
    return f'<rect x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" height="8" {style}/>'


def legend(y: float) -> list[str]:
    return [
        bar(40, 46, y - 8, "fill='none' stroke='#c2651a' stroke-dasharray='3 2'"),
        text(place(46) + 8, y, "predicted", "font-size='11' fill='#555'"),
        bar(80, 92, y - 8, "fill='#1f5fbf' stroke='#1f5fbf'"),
        text(place(92) + 8, y, "achieved", "font-size='11' fill='#555'"),
        bar(160, 184, y - 8, "fill='none' stroke='#777'"),
        text(place(184) + 8, y, "measured, not kept", "font-size='11' fill='#555'"),
    ]


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
