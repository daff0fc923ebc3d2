"""`ridgeline plan --verify plan-1.json`: the plan's step is run where its hardware is, and what it
took stands beside what was planned, part by part. `ridgeline report accuracy` remembers it.

    ridgeline plan tiny --gpus 2xhere --sequence-length 128 --batch 8 --out plans
    ridgeline plan --verify plans/plan-1.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.plan.measuring import StepOrder, measured_step, taken_words
from ridgeline.cli.plan.models import is_shape
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import detect
from ridgeline.hardware.units import human
from ridgeline.parallel.layout import Layout
from ridgeline.planning.clusters.here import num_here
from ridgeline.planning.output.document import SCHEMA
from ridgeline.planning.training.corrections import as_measured
from ridgeline.profiling.predicting.accuracy import PredictionOutcome, remember
from ridgeline.profiling.printing import safe_text

AREA = "plan: training step"
NEEDED = ("model", "layout", "sequence", "batch", "micro_batch", "recomputation", "precision",
          "step_s", "tokens_per_s", "parts", "device", "num_gpus")  # fmt: skip


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    plan = load_plan(args.verify)
    layout = Layout.parse(str(args.verify))
    check_hardware(plan, args.verify)
    order = StepOrder(
        plan["model"], is_shape(plan["model"]), plan["sequence"], plan["batch"],
        plan["micro_batch"], plan["recomputation"], plan["precision"],
        None if layout.is_single else args.verify, num_steps=args.steps,
    )  # fmt: skip
    taken = taken_words()
    with terminal.progress() as progress:
        progress("running the plan", 0, 1)
        measured = measured_step(order)
    expected = plan["tokens_per_s"]
    outcome = PredictionOutcome(
        AREA, plan["layout_words"], expected["value"], measured.tokens_per_s, measured.device,
        plan["model"], expected["low"], expected["high"],
    )  # fmt: skip
    remember([outcome])
    return {
        "plan": str(args.verify),
        "model": plan["model"],
        "device": measured.device,
        "layout": plan["layout_words"],
        "predicted": {key: plan[key] for key in ("step_s", "tokens_per_s")},
        "measured": {"step_s": measured.step_s, "tokens_per_s": measured.tokens_per_s},
        "error": outcome.error,
        "held": outcome.held,
        "parts": parts_of(plan["parts"], measured.parts),
        "taken": taken,
    }


def load_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(plan, dict) or "layout" not in plan:
        raise UsageError(f"{path} is no plan; give a plan-N.json that `ridgeline plan --out` wrote")
    if plan.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} is of schema {plan.get('schema')}, from Ridgeline {plan.get('version')}; this "
            f"version reads {SCHEMA}: make the plan again"
        )
    missing = [name for name in NEEDED if name not in plan]
    if missing:
        raise UsageError(f"{path} lacks {', '.join(missing)}; make the plan again")
    return plan


def check_hardware(plan: dict[str, Any], path: Path) -> None:
    """That this machine has what was planned for."""
    here = detect()
    count = num_here(here)
    if here.name != plan["device"] or count < plan["num_gpus"]:
        cores = "cores of " if here.device_type == "cpu" else "x "
        raise HardwareError(
            f"{path} is a plan for {plan['num_gpus']:,} x {plan['device']}, and this machine has "
            f"{count} {cores}{here.name}; run --verify there, or plan for --gpus here"
        )


def parts_of(planned: dict[str, float], measured: dict[str, float]) -> list[dict[str, Any]]:
    """The largest gap first."""
    expected = as_measured(planned)
    rows = [
        {"part": name, "predicted_s": expected[name], "measured_s": measured[name],
         "gap_s": measured[name] - expected[name]}
        for name in expected
        if expected[name] > 0 or measured[name] > 0
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -abs(row["gap_s"]))


def render(document: dict[str, Any], console: Console) -> None:
    console.print(
        safe_text(f"{document['model']} on {document['device']}, {document['layout']}"),
        style="bold",
    )
    step, low = document["predicted"]["step_s"], document["measured"]["step_s"]
    held = "inside" if document["held"] else "OUTSIDE"
    console.print(
        f"a step: planned {human(step['value'], 's')} ({human(step['low'], 's')} to "
        f"{human(step['high'], 's')}), measured {human(low, 's')}: {held} the interval; planned "
        f"speed {document['error']:+.0%} off",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for name in ("planned", "measured", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in document["parts"]:
        table.add_row(
            row["part"], human(row["predicted_s"], "s"), human(row["measured_s"], "s"),
            ("+" if row["gap_s"] > 0 else "-") + human(abs(row["gap_s"]), "s"),
        )  # fmt: skip
    console.print(table)
    if document["taken"]:
        console.print(document["taken"], soft_wrap=True)
    console.print("`ridgeline report accuracy` remembers it", style="dim")
