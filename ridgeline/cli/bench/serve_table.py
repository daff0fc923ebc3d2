"""The result of `bench serve` as a table with a column per endpoint."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

LATENCIES = {
    "first_token": "first token (TTFT)",
    "per_output_token": "per output token (TPOT)",
    "between_events": "between events (ITL)",
    "request": "whole request",
}
PERCENTILES = ("p50", "p90", "p99")


def render(result: dict[str, Any], console: Console) -> None:
    ends = result["endpoints"]
    models = ", ".join(dict.fromkeys(end["model"] for end in ends))
    console.print(f"{models}; workload {result['workload']}, {result['arrivals']}", markup=False)
    console.print(table_of(result))
    for end in ends:
        prefix = f"{end['url']}: " if len(ends) > 1 else ""
        for line in remarks(end):
            console.print(prefix + line, markup=False)
    for name in ("record", "plot"):
        if name in result:
            console.print(f"{name}: {result[name]}", markup=False)


def remarks(end: dict[str, Any]) -> list[str]:
    """What to know about the numbers."""
    lines = [end["found"]["in_words"]] if end["found"] is not None else []
    if end["num_short"]:
        lines.append(f"{end['num_short']} answers were shorter than requested")
    lines += [f"error: {detail}" for detail in end["details"]]
    lines += end["notes"]
    return lines + ([end["client_note"]] if end["client_note"] else [])


def table_of(result: dict[str, Any]) -> Table:
    ends = result["endpoints"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("latencies: p50 / p90 / p99", style="dim")
    for end in ends:
        table.add_column(end["url"].partition("://")[2], justify="right", overflow="fold")
    for label, cell in rows(result):
        table.add_row(label, *(cell(end) for end in ends))
    return table


def rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Labels, and what stands in an endpoint's column."""
    result_rows: list[tuple[str, Any]] = [
        ("requests answered", lambda end: f"{end['num_answered']} of {end['num_requests']}"),
        ("errors", lambda end: errors_text(end["errors"])),
        ("requests/s", lambda end: f"{end['requests_per_s']:.2f}{offered_text(end)}"),
        ("output tokens/s", tokens_text),
        ("tokens in, out", sizes_text),
    ]
    for key, label in LATENCIES.items():
        result_rows.append((f"{label}, ms", lambda end, key=key: latency_text(end[key])))
    if any(result["bound"].values()):
        result_rows.append((bound_text(result["bound"]), within_text))
        result_rows.append(("goodput, requests/s", lambda end: f"{end['goodput']:.2f}"))
    if any(end["found"] is not None for end in result["endpoints"]):
        result_rows.append(("highest passing rate", highest_text))
    return [*result_rows, ("load client", own_text)]


def errors_text(errors: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "none"


def offered_text(end: dict[str, Any]) -> str:
    return "" if end["offered_rate"] is None else f" ({end['offered_rate']:.2f} offered)"


def tokens_text(end: dict[str, Any]) -> str:
    rates = end["rounds"]
    rounds = f" ({min(rates):.0f} to {max(rates):.0f})" if rates[1:] else ""
    return f"{end['output_tokens_per_s']:.1f}{rounds}"


def sizes_text(end: dict[str, Any]) -> str:
    prompts = end["num_prompt_tokens"]
    return f"{'unknown' if prompts is None else prompts}, {end['num_output_tokens']}"


def latency_text(latency: dict[str, float] | None) -> str:
    if latency is None:
        return "none"
    values = [1000 * latency[name] for name in PERCENTILES]
    return " / ".join(f"{value:.0f}" if value >= 1000 else f"{value:.1f}" for value in values)


def bound_text(bound: dict[str, float | None]) -> str:
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT"}
    parts = [f"{names[key]} ≤ {value:g} ms" for key, value in bound.items() if value is not None]
    return f"within {', '.join(parts)}"


def within_text(end: dict[str, Any]) -> str:
    share = end["within"]
    if share["low"] is None:
        return f"{share['value']:.1%}"
    return f"{share['value']:.1%} ({share['low']:.1%} to {share['high']:.1%})"


def highest_text(end: dict[str, Any]) -> str:
    highest = end["found"]
    if highest["rate"] is None:
        return "none"
    return f"{highest['rate']:.3g}/s{'' if highest['is_sure'] else ' (not sure)'}"


def own_text(end: dict[str, Any]) -> str:
    own = end["own"]
    late, lag = 1e3 * own["late_p99_s"], 1e3 * own["lag_p99_s"]
    busy = f"{own['cpu_share']:.0%} CPU, {1e6 * own['cpu_s_per_event']:.0f} µs/event"
    return f"p99 late {late:.1f} ms, lag {lag:.1f} ms; {busy}"
