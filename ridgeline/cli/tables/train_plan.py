"""How a training run that is only planned is shown: its memory, item by item, and its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.hardware.units import human, human_bytes
from ridgeline.parallel.layout import Layout

ALONE = Layout().words()


def draw_plan(result: Mapping[str, Any], console: Console) -> None:
    config, memory = result["config"], result["memory"]
    batch, length = config["batch"], config["data"]["sequence_length"]
    console.print(
        f"{config['model'] or config['shape']} on {result['device']}: {config['precision']}, "
        f"{batch['sequences']} x {length} tokens a step, {batch['micro']} at once, recomputation "
        f"{config['recomputation']}"
        + ("" if result["layout"] == ALONE else f", layout {result['layout']}"),
        soft_wrap=True,
    )
    console.print()
    console.print(_memory_table(memory))
    console.print(
        f"[dim]of {human_bytes(memory['free_bytes'])} free; the peak is during "
        f"{memory['moment']}[/dim]"
    )
    console.print()
    prediction = result["prediction"]
    if result["layout"] != ALONE:
        console.print(_collectives_table(result["collectives"]))
        console.print("speed: not predicted under a layout of several devices")
    elif prediction is None:
        console.print("speed: not predicted, as nothing is known of this device's rates")
    else:
        _draw_prediction(prediction, console)
    if result["quarantine"] is not None:
        console.print(result["quarantine"], markup=False, soft_wrap=True)
    console.print("nothing was started; leave --dry-run out to train")


def _memory_table(memory: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("memory")
    table.add_column("planned", justify="right", no_wrap=True)
    table.add_column("for")
    for item in memory["items"]:
        table.add_row(item["name"], human_bytes(item["num_bytes"]), item["meaning"])
    table.add_row("in all", human_bytes(memory["used_bytes"]), style="bold")
    return table


def _collectives_table(collectives: Sequence[Mapping[str, Any]]) -> Table:
    """What a rank tells the others in a step."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("in a step")
    table.add_column("over")
    for name in ("ranks", "times", "message bytes", "sent"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in collectives:
        table.add_row(
            each["kind"],
            each["over"],
            f"{each['num_ranks']:,}",
            f"{each['count']:,}",
            human_bytes(each["num_bytes"]),
            human_bytes(round(each["sent_bytes"])),
        )
    return table


def _draw_prediction(prediction: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("predicted step")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    step_s = prediction["step_s"]
    for name, seconds in prediction["parts"].items():
        if seconds > 0:
            table.add_row(name, human(seconds, "s"), f"{seconds / step_s:.0%}")
    table.add_row("in all", human(step_s, "s"), "", style="bold")
    console.print(table)
    low, high = human(prediction["step_s_low"], "s"), human(prediction["step_s_high"], "s")
    console.print(f"[dim]likely {low} to {high}; ceilings {prediction['ceilings']}[/dim]")
    console.print()
    console.print(f"a step is {prediction['sentence']}", soft_wrap=True)
    console.print(f"speed: {_speed(prediction)}", soft_wrap=True)
    measuring = prediction["evaluation_s"]
    also = f", {duration(measuring)} of it for held-out loss" if measuring >= 0.5 else ""
    steps = prediction["steps"]
    console.print(
        f"run: {steps:,} step{'' if steps == 1 else 's'}, {prediction['tokens']:,} tokens, "
        f"{duration(prediction['total_s'])}{also}; loading and the last checkpoint are not counted",
        soft_wrap=True,
    )


def _speed(prediction: Mapping[str, Any]) -> str:
    words = [f"{prediction['tokens_per_s']:,.0f} tokens/s"]
    shares = {"mfu": "of the datasheet's peak", "mfu_measured": "of the measured peak"}
    known = [
        f"{prediction[key]:.1%} {name}"
        for key, name in shares.items()
        if prediction[key] is not None
    ]
    words.append(f"MFU {', '.join(known)}" if known else "no MFU: the device's rate is not known")
    return ", ".join(words)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
