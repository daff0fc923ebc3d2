"""`ridgeline optimize`: climbs the ladder, keeps what is faster and still right, and writes the
recipe, the checkpoint and the report. tables/optimize.py draws the result.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.serve.bound import USUAL_SHARE, LatencyBound
from ridgeline.cli.arguments.options import (
    add_flags,
    add_latency_bounds,
    add_model,
    add_workload,
    first_key,
    from_flags,
)
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.arguments.tasks import add_task, check_task_flags
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.training.optimize import add_training_arguments, check_flags, training_order
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, INTERRUPTED_EXIT_CODE, UsageError
from ridgeline.hardware import detect
from ridgeline.ladder.climbing.check import check_folder
from ridgeline.ladder.climbing.climb import climb_model
from ridgeline.ladder.guessing.preview import preview
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.peer import PeerOrder
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.order import ClimbOrder, prepared, usual_measured
from ridgeline.ladder.reporting.folder import REPORT
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.searching.budget import parse_duration
from ridgeline.ladder.training.run import climb_training
from ridgeline.profiling.printing import safe_text
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quality.tasks import TaskOptions

EXAMPLE = """\
ridgeline optimize demo --out demo-fast --budget 4m
ridgeline optimize ./model --out fast --for throughput --max-kl 0.01
ridgeline optimize --check fast
ridgeline optimize --train demo --data book.txt --out fast --budget 10m"""
MAIN_FLAGS = (
    "--shape", "--device", "--train", "--for", "--ttft-ms", "--tpot-ms", "--workload",
    "--peer-url", "--out", "--budget", "--resume", "--dry-run", "--check", "--max-kl",
    "--max-ppl-increase",
)  # fmt: skip

ALL_TEXT = 1 << 30  # windows: as many as a given text has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    group(parser, "model").add_argument(
        "--draft-model",
        metavar="MODEL",
        help="also try speculative decoding with this small model (same tokenizer)",
    )
    goal = group(parser, "goal")
    goal.add_argument(
        "--for",
        dest="goal",
        choices=("latency", "throughput"),
        default="latency",
        help="latency: one request at a time; throughput: all at once (default: %(default)s)",
    )
    add_latency_bounds(
        goal,
        f"; finds the recipe with the highest request rate at which {USUAL_SHARE:.0%}% meet it",
    )
    meaning = "batch-1 for latency; for throughput: throughput on a GPU, cpu on a CPU"
    add_workload(parser, meaning=meaning)
    add_peer_arguments(parser)
    add_run_arguments(parser)
    add_quality_arguments(parser)
    add_training_arguments(parser)


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    peer = group(parser, "peer")
    peer.add_argument(
        "--peer-url",
        metavar="URL",
        help="also measure this OpenAI endpoint under the same workload, e.g. http://host:8000",
    )
    peer.add_argument(
        "--peer-model", metavar="NAME", help="model name to send (default: the first it lists)"
    )
    peer.add_argument(
        "--peer-api-key-file",
        type=Path,
        metavar="FILE",
        help="file with its API key (default: $OPENAI_API_KEY)",
    )


def asked_peer(args: argparse.Namespace) -> PeerOrder | None:
    if args.peer_url is None:
        for name in ("peer_model", "peer_api_key_file"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs a --peer-url")
        return None
    key = first_key(args.peer_api_key_file, "--peer-api-key-file")
    return PeerOrder(args.peer_url, args.peer_model, key)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    run = group(parser, "run")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="new or empty folder (default: MODEL-optimized)"
    )
    run.add_argument(
        "--budget",
        metavar="TIME",
        help="time limit, e.g. 10m; tries the most promising changes first",
    )
    run.add_argument(
        "--rounds",
        type=int,
        default=MIN_ROUNDS,
        metavar="N",
        help="rounds per comparison, at least; a close one gets more (default: %(default)s)",
    )
    run.add_argument("--resume", action="store_true", help="continue a stopped run in --out")
    run.add_argument(
        "--dry-run", action="store_true", help="only list the changes with their predicted gain"
    )
    run.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="measure the result in DIR again; exit code 13 if it is slower or less accurate",
    )


def add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    quality = group(parser, "quality")
    quality.add_argument(
        "--quality",
        choices=("on", "off"),
        default="on",
        help="off: do not compare with the unmodified model (default: %(default)s)",
    )
    add_flags(parser, QualityBounds)
    quality.add_argument(
        "--text", type=Path, metavar="FILE", help="text to measure on (default: a built-in one)"
    )
    quality.add_argument(
        "--window", type=int, metavar="N", help="tokens per window (default: 512; 256 on a CPU)"
    )
    add_task(parser, "quality")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check_flags(args)
    if args.train:
        return run_training(args, terminal)
    if args.check is not None:
        return run_check(args, terminal)
    order = asked_order(args)
    if args.dry_run:
        with terminal.progress() as progress:
            return {"kind": "preview", **preview(prepared(order, progress))}
    with terminal.whole_run() as whole:
        climb = climb_model(order, whole)
    return climb_document(climb, order.out)


def run_training(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    order = training_order(args)
    with terminal.whole_run() as whole:
        climb = climb_training(order, whole)
    return climb_document(climb, order.out)


def climb_document(climb: Climb, out: Path) -> dict[str, Any]:
    stopped = any(note.startswith("stopped by") for note in climb.notes)
    return {
        "kind": "climb",
        "out": str(out),
        "report": str(out / REPORT),
        "stopped": stopped,
        "climb": climb.to_json(),
    }


def run_check(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    for name in ("model", "shape", "out"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--check takes only the folder; remove {'' if name == 'model' else '--'}{name}"
            )
    with terminal.progress() as progress:
        checked = check_folder(
            args.check,
            device=args.device,
            rounds=args.rounds,
            quality=args.quality == "on",
            progress=progress,
        )
    return {"kind": "check", "passed": not checked.problems, **checked.to_json()}


def asked_order(args: argparse.Namespace) -> ClimbOrder:
    given: QualityBounds = from_flags(args, QualityBounds)
    quality = args.quality == "on"
    if not quality and (given.are_given or args.text or args.task):
        raise UsageError(
            "--max-kl, --max-ppl-increase, --text and --task do not go with --quality off"
        )
    options = TaskOptions(args.limit, args.shots, args.examples, args.run_code)
    check_task_flags(args, options)
    if args.text is not None and not args.text.is_file():
        raise UsageError(f"there is no file {str(args.text)!r}; give a text file")
    bounds = given.filled_from(USUAL)
    return ClimbOrder(
        args.model,
        args.shape,
        args.out or Path(f"{Path(args.model or args.shape or 'model').stem}-optimized"),
        args.goal,
        args.workload,
        args.output_tokens,
        bounds,
        LatencyBound.of_ms(args.ttft_ms, args.tpot_ms),
        quality,
        asked_measured(args),
        None if args.budget is None else parse_duration(args.budget),
        args.resume,
        args.device,
        args.rounds,
        args.draft_model,
        asked_peer(args),
    )


def asked_measured(args: argparse.Namespace) -> Measured:
    usual = usual_measured(detect(args.device).device)
    if args.window is not None and args.window < 2:
        raise UsageError(f"--window is {args.window}; give at least 2 tokens")
    text = None if args.text is None else str(args.text.resolve())
    return replace(
        usual,
        text=text,
        window=args.window or usual.window,
        num_windows=usual.num_windows if text is None else ALL_TEXT,
        task=args.task,
        data=None if args.data is None else str(args.data.resolve()),
        limit=args.limit,
        shots=args.shots,
        examples=None if args.examples is None else str(args.examples.resolve()),
        run_code=args.run_code,
    )


def exit_code(document: dict[str, Any]) -> int:
    if document["kind"] == "check" and not document["passed"]:
        return CHECK_FAILED_EXIT_CODE
    return INTERRUPTED_EXIT_CODE if document.get("stopped") else 0


def render(result: dict[str, Any], console: Console) -> None:
    if result["kind"] == "preview":
        render_preview(result, console)
    elif result["kind"] == "check":
        render_check(result, console)
    else:
        climb = Climb.from_json(result["climb"])
        console.print(climb_table(climb))
        console.print(f"report: {result['report']}", markup=False, soft_wrap=True)
        words = {"bench": "run it", "train": "train with it"}
        word = words.get(climb.serve_command[1], "serve it")
        console.print(f"{word}: {shlex.join(climb.serve_command)}", markup=False, soft_wrap=True)


def render_check(result: dict[str, Any], console: Console) -> None:
    speed = result["speed"]
    if speed is not None:
        interval = f"{speed['low']:.2f} to {speed['high']:.2f}"
        console.print(f"speed: {speed['value']:.2f}x the record ({interval})")
    if result["proof_words"] is not None:
        console.print(result["proof_words"], markup=False)
    if result["quality"] is not None:
        now, before = result["quality"]["mean_kl"], result["quality_before"]["mean_kl"]
        console.print(f"mean KL: {now:.5f}, was {before:.5f}")
    for line in (*result["remarks"], *result["problems"]):
        console.print(line, markup=False)
    console.print(
        "passed: as fast and accurate as recorded"
        if result["passed"]
        else "failed: worse than recorded"
    )


def render_preview(result: dict[str, Any], console: Console) -> None:
    console.print(f"{result['model']} on {result['device']}; workload {result['workload']}")
    guess = result["guess"]
    gain = guess["predicted"]["speedup"]
    console.print(
        safe_text(f"first guess: {gain:.2f}x the engine's defaults with {guess['title']}", "bold")
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("change", overflow="fold")
    for entry in result["rungs"]:
        predicted = entry["predicted"]
        gain = "" if predicted is None else f"{predicted['speedup']:.2f}x"
        table.add_row(gain, safe_text(f"{entry['title']}: {entry['reason']}"))
    console.print(table)
    console.print(result["note"], markup=False)
