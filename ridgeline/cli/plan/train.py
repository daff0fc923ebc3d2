"""`ridgeline plan MODEL --gpus CLUSTER --for train`: which layout, how fast, how many days, what
money, and why not another.

    ridgeline plan llama-3.1-405b --gpus 2048xH100 --for train --tokens 15T
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.plan.models import model_of as model_of
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import OutOfMemoryError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig
from ridgeline.models.cost import num_parameters
from ridgeline.planning.clusters.cluster import Cluster
from ridgeline.planning.memory.ledger import heaviest_of, usable_bytes
from ridgeline.planning.output.document import (
    TrainAnswer,
    command_of,
    plan_file,
    train_document,
)
from ridgeline.planning.output.page import write_plan_page
from ridgeline.planning.search.best import SLOWER
from ridgeline.planning.search.sizes import joined_pool, search_sizes
from ridgeline.planning.search.space import WantedRun, check_batch
from ridgeline.planning.search.why_not import more_gpus, shortage, smallest
from ridgeline.planning.training.constants import load_fitted
from ridgeline.planning.training.corrections import corrected_for
from ridgeline.planning.training.setup import Units
from ridgeline.profiling.printing import safe_text

COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMBGT]?)", re.IGNORECASE)
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# Tokens of a step where no batch is given, by the model's size: what runs of that size have used.
USUAL_STEP_TOKENS = ((1e9, 2**19), (2e10, 2**22), (1e11, 2**23), (float("inf"), 2**24))
NUM_PLANS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training = group(parser, "training")
    training.add_argument("--tokens", metavar="N", help="of the whole run: 15T, 300B, 2e9")
    training.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of a sequence (default: 8192, or "
        "the model's context)",
    )  # fmt: skip
    training.add_argument(
        "--batch", type=int, metavar="N", help="sequences of a step (default: by the model's size)"
    )
    training.add_argument("--micro-batch", type=int, metavar="N", help="sequences of a pass")
    training.add_argument(
        "--recomputation", choices=("none", "elementwise", "attention", "blocks"),
        help="what is computed again (default: what is fastest)",
    )  # fmt: skip
    training.add_argument(
        "--precision", choices=("bf16", "fp8", "fp16", "fp32"),
        help="what products are computed in (default: bf16; on a CPU fp32)",
    )  # fmt: skip
    group(parser, "output").add_argument(
        "--out", type=Path, metavar="DIR",
        help="write plan-1.json and so on, plan.json and the page plan.html there",
    )  # fmt: skip


def parse_count(text: str) -> float:
    """`15T`, `300B`, `2e9`."""
    try:
        value = float(text)
    except ValueError:
        match = COUNT.fullmatch(text.strip())
        value = float(match[1]) * FACTORS[match[2].lower()] if match else 0.0
    if not 0 < value < 1e18:
        raise UsageError(f"{text!r} is no number of tokens; give e.g. 15T, 300B or 2000000")
    return value


def run(args: argparse.Namespace, cluster: Cluster, terminal: Terminal) -> dict[str, Any]:
    tokens = None if args.tokens is None else parse_count(args.tokens)
    model = model_of(args.model)
    sequence = args.sequence_length or min(8192, model.max_context)
    if sequence < 1 or sequence > model.max_context:
        raise UsageError(
            f"--sequence-length is {sequence}; give 1 to {model.max_context}, the model's context"
        )
    batch = usual_batch(model, sequence, cluster) if args.batch is None else args.batch
    check_batch(batch, cluster.num_gpus)
    if args.micro_batch is not None and args.micro_batch < 1:
        raise UsageError(f"--micro-batch is {args.micro_batch}; give at least 1 sequence")
    joined = joined_pool(cluster)
    precision: Units = args.precision or ("fp32" if joined.kind == "cpu" else "bf16")
    if joined.rate(precision) is None:
        raise UsageError(f"--precision {precision}: {joined.gpu.name} does not multiply in it")
    wanted = WantedRun(sequence, batch, precision, args.micro_batch, args.recomputation)
    fitted = corrected_for(load_fitted(), joined)
    with terminal.progress() as progress:
        searches = search_sizes(model, cluster, wanted, fitted, NUM_PLANS, progress)
    main = searches[0]
    if not main.result.plans:
        raise OutOfMemoryError(nothing_fits(args.model, main.result, cluster))
    answer = TrainAnswer(args.model, cluster, tokens, searches, fitted, sequence, batch)
    document = train_document(answer)
    if args.out is not None:
        document["files"] = write_files(document, args.out)
    return document


def usual_batch(model: ModelConfig, sequence: int, cluster: Cluster) -> int:
    """A step's usual tokens in sequences, as many as GPUs can share: powers of two."""
    count = num_parameters(model)
    tokens = next(tokens for most, tokens in USUAL_STEP_TOKENS if count < most)
    num_gpus = joined_pool(cluster).num_gpus
    odd = num_gpus
    while odd % 2 == 0:
        odd //= 2
    wanted = max(1, tokens // sequence)
    return max(1, round(wanted / odd)) * odd


def nothing_fits(name: str, result: Any, cluster: Cluster) -> str:
    """One line: the nearest there was, and what would help."""
    if not result.cores:
        why = ", ".join(result.reasons) or "none is legal for this batch"
        return (
            f"{name} fits {cluster.words()} in no layout: {why}; change --batch or the number of "
            "GPUs"
        )
    pool = joined_pool(cluster)
    setup = smallest([core for _, core in result.cores])
    words = shortage(heaviest_of(setup), usable_bytes(pool))
    enough = more_gpus(setup, pool)
    more = f"{enough:,} of them would do" if enough else "use GPUs with more memory"
    return (
        f"{name} fits {cluster.words()} in no layout; the smallest, {setup.layout.words()}, "
        f"micro-batch {setup.micro}, recomputation {setup.recomputation}, {words}; {more}, or a "
        "shorter --sequence-length"
    )


def write_files(document: dict[str, Any], folder: Path) -> list[str]:
    files = []
    for plan in document["plans"]:
        path = folder / f"plan-{plan['number']}.json"
        with atomic_write(path) as file:
            json.dump(plan_file(document, plan), file, indent=1)
        files.append(str(path))
    path = folder / "plan.json"
    with atomic_write(path) as file:
        json.dump(document, file, indent=1)
    page = folder / "plan.html"
    write_plan_page(document, page, command_of(document, document["plans"][0], files[0]))
    return [*files, str(path), str(page)]


def render(document: dict[str, Any], console: Console) -> None:
    console.print(safe_text(f"{document['model']} on {document['cluster']}"), style="bold")
    tokens = f", {document['tokens']:,.0f} tokens in all" if document["tokens"] else ""
    console.print(
        f"{document['batch']:,} sequences of {document['sequence']:,} tokens a step{tokens}"
    )
    console.print()
    console.print(plans_table(document))
    best = document["plans"][0]
    console.print(safe_text(f"recommended: 1, {best['layout_words']}"), soft_wrap=True)
    for plan in document["plans"][1:]:
        console.print(safe_text(f"{plan['number']}: {plan['differs']}"), soft_wrap=True)
    console.print(safe_text(f"sure ±{document['error']:.0%}: {document['basis']}"), style="dim",
                  soft_wrap=True)  # fmt: skip
    console.print()
    console.print("a step of plan 1: " + parts_words(best["parts"]), soft_wrap=True)
    console.print(stages_words(best, document["usable_bytes"]), soft_wrap=True)
    if len(document["frontier"]) > 1:
        console.print()
        console.print(frontier_table(document))
    if document["why_nots"]:
        console.print()
        console.print(why_not_table(document))
    console.print(tried_words(document), style="dim", soft_wrap=True)
    file = next(iter(document.get("files", [])), "plan-1.json")
    console.print()
    console.print(safe_text("run it: " + command_of(document, best, file)), soft_wrap=True)
    if "files" not in document:
        console.print("(--out DIR writes plan-1.json and a page)", style="dim")


def plans_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "micro", "recomputes"):
        table.add_column(name, no_wrap=True)
    headings = ["step s", "tokens/s", "MFU", "GiB"]
    plans = document["plans"]
    keys = [key for key in ("days", "energy_mwh", "cost") if plans[0][key] is not None]
    names = {"days": "days", "energy_mwh": "MWh", "cost": "cost"}
    for name in (*headings, *(names[key] for key in keys), "sure"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        table.add_row(
            str(plan["number"]), str(plan["micro_batch"]), plan["recomputation"],
            f"{plan['step_s']['value']:.3g}",
            f"{plan['tokens_per_s']['value']:,.0f}", f"{plan['mfu']['value']:.0%}",
            f"{plan['peak_bytes']['value'] / 2**30:.1f}",
            *(_run_figure(key, plan[key]["value"]) for key in keys),
            f"±{document['error']:.0%}",
        )  # fmt: skip
    return table


def _run_figure(key: str, value: float) -> str:
    """`480.7` days, `25,605` MWh, `56.7M` of money."""
    if key == "days":
        return f"{value:,.1f}"
    if key == "cost" and value >= 1e6:
        return f"{value / 1e6:,.1f}M"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def parts_words(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    shown = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in shown if value > 0.01 * total)


def stages_words(plan: dict[str, Any], usable: int) -> str:
    totals = [sum(item["num_bytes"] for item in stage["items"]) for stage in plan["stages"]]
    heaviest = max(range(len(totals)), key=totals.__getitem__)
    items = sorted(plan["stages"][heaviest]["items"], key=lambda item: -item["num_bytes"])[:4]
    words = ", ".join(f"{item['name']} {human_bytes(item['num_bytes'])}" for item in items)
    which = f"device {heaviest} of the pipeline" if len(totals) > 1 else "each GPU"
    return (
        f"memory: {which} holds {human_bytes(totals[heaviest])} of {human_bytes(usable)}: {words}"
    )


def frontier_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0),
                  title="fewer GPUs, or another pool", title_justify="left")  # fmt: skip
    rows = document["frontier"]
    keys = [key for key in ("days", "cost") if rows[0][key] is not None]
    table.add_column("GPUs", no_wrap=True)
    for name in ("tokens/s", "tokens/s/GPU", "MFU", *keys):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['num_gpus']:,} {row['gpu']}",
            f"{row['tokens_per_s']['value']:,.0f}", f"{row['tokens_per_s_gpu']['value']:,.0f}",
            f"{row['mfu']['value']:.0%}",
            *("–" if row[key] is None else _run_figure(key, row[key]["value"]) for key in keys),
        )  # fmt: skip
    return table


def why_not_table(document: dict[str, Any]) -> Table:
    """What a reader would ask, and what the best such plan costs, or lacks."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0),
                  title="why not …", title_justify="left")  # fmt: skip
    table.add_column("", no_wrap=True)
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("because")
    for each in document["why_nots"]:
        slower, reason = each["slower"], each["reason"]
        if slower is None:
            reason += f"; fits with {each['remedy']}"
        table.add_row(
            safe_text(each["question"]), "no room" if slower is None else f"{slower:+.0%}",
            safe_text(reason),
        )  # fmt: skip
    return table


def tried_words(document: dict[str, Any]) -> str:
    """How far the search went."""
    reasons = document["reasons"]
    memory = sum(count for name, count in reasons.items() if name.startswith("memory"))
    return (
        f"{document['num_settings']:,} legal settings: {memory:,} need more memory than a GPU has, "
        f"{reasons.get(SLOWER, 0):,} cannot be faster than these plans, "
        f"{document['num_estimated']:,} were estimated"
    )
