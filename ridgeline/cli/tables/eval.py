"""`ridgeline eval` in the terminal: figures with their intervals, and the layers."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

NUM_PARTS = 12  # rows of the table of layers


def render(document: dict[str, Any], console: Console) -> None:
    console.print(f"{named(document)}, on {document['device']}", markup=False)
    if document["plain_for_speed"]:
        console.print(document["plain_for_speed"], markup=False)
    console.print(figures(document))
    layers = (document["against"] or {}).get("layers")
    if layers:
        console.print(layer_table(layers))
    gate = document["gate"]
    if gate is not None:
        verdict = gate["verdict"] if gate["passed"] else f"refused: {gate['problem']}"
        console.print(verdict, style="green" if gate["passed"] else "bold red", markup=False)
    if "record" in document:
        console.print(f"record: {document['record']}", markup=False)


def named(subject: dict[str, Any]) -> str:
    return f"{subject['model']} in {form(subject)}"


def form(subject: dict[str, Any]) -> str:
    """`bf16, int4-g128, KV in fp8`."""
    scheme = f", {subject['scheme']}" if subject["scheme"] else ""
    scheme += f", head {subject['head']}" if subject["head"] != "plain" else ""
    return f"{subject['dtype']}{scheme}, KV in {subject['kv_dtype']}"


def figures(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    if document["text"] is not None:
        text_rows(table, document["text"])
    if document["peer"] is not None:
        peer_rows(table, document["peer"])
    against = document["against"]
    if against is not None and against["divergence"] is not None:
        divergence_rows(table, against)
    if document["task"] is not None:
        task_rows(table, document["task"], against)
    return table


def text_rows(table: Table, text: dict[str, Any]) -> None:
    size = f"{text['num_tokens']} tokens, {text['num_windows']} windows of {text['window']}"
    row(table, "perplexity", text["perplexity"], "{:.3f}", size)
    if text["bits_per_byte"] is not None:
        row(table, "bits per byte", text["bits_per_byte"], "{:.4f}", f"{text['seconds']:.1f} s")


def peer_rows(table: Table, peer: dict[str, Any]) -> None:
    remark = f"{peer['version']}, {peer['dtype']}, {peer['seconds']:.1f} s"
    row(table, peer["name"], peer["perplexity"], "{:.3f}", remark)
    row(table, "difference", peer["difference"], "{:+.4%}", "ours to theirs, same tokens")


def divergence_rows(table: Table, against: dict[str, Any]) -> None:
    divergence = against["divergence"]
    row(table, "original", divergence["original"]["perplexity"], "{:.3f}", form(against))
    row(table, "increase", divergence["perplexity_increase"], "{:+.3%}", "of perplexity, paired")
    row(table, "mean KL", divergence["mean_kl"], "{:.3g}", "nats per token")
    row(table, "p99 KL", divergence["p99_kl"], "{:.3g}", f"max {divergence['max_kl']:.3g}")
    row(table, "changed", divergence["changed_share"], "{:.2%}", "of the likeliest tokens")


def task_rows(table: Table, task: dict[str, Any], against: dict[str, Any] | None) -> None:
    shots = f", {task['shots']:.0f} shots" if "shots" in task else ""
    size = f"{task['metric']}{shots}, {task['num_questions']} questions, {task['seconds']:.1f} s"
    row(table, task["name"], task["score"], "{:.1%}", size)
    if "acc" in task:
        row(table, "acc", task["acc"], "{:.1%}", "not divided by the lengths of the endings")
    if "subjects" in task:
        table.add_row("subjects", str(len(task["subjects"])), "", extremes(task["subjects"]))
    for name in ("problems", "isolation"):
        if task.get(name):
            table.add_row(name, "", "", str(task[name]))
    if against is not None and "original" in task:
        row(table, "original", task["original"]["score"], "{:.1%}", form(against))
        row(table, "difference", task["difference"], "{:+.1%}", "same questions, paired")


def extremes(subjects: dict[str, float]) -> str:
    """`anatomy 25.0% to virology 75.0%; all in --json`."""
    low, high = min(subjects, key=subjects.__getitem__), max(subjects, key=subjects.__getitem__)
    return f"{low} {subjects[low]:.1%} to {high} {subjects[high]:.1%}; all in --json"


def row(table: Table, label: str, figure: Any, form: str, remark: str) -> None:
    """A figure with an interval, or a bare number."""
    if not isinstance(figure, dict):
        table.add_row(label, form.format(figure), "", remark)
        return
    ends = (
        ""
        if figure["low"] is None
        else " to ".join(form.format(figure[end]) for end in ("low", "high"))
    )
    table.add_row(label, form.format(figure["value"]), ends, remark)


def layer_table(layers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layers with the largest error")
    table.add_column("signal to error", justify="right")
    table.add_column("its block", justify="right")
    for part in layers[:NUM_PARTS]:
        is_block = part["kind"] == "block" or part["name"] == "head"
        name = part["name"] if is_block else f"  {part['name']}"
        table.add_row(
            name, f"{part['db']:.1f} dB", "" if is_block else f"{part['block_db']:.1f} dB"
        )
    if len(layers) > NUM_PARTS:
        table.caption = f"{len(layers) - NUM_PARTS} more in --json"
    return table
