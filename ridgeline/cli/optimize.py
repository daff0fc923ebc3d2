"""`ridgeline optimize`: climbs the ladder, keeps what is faster and still right, and writes the
recipe, the checkpoint and the report. What people see of it is optimize_table.py's.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.bench.serve.bound import USUAL_SHARE, LatencyBound
from ridgeline.cli.eval import check_task_flags
from ridgeline.cli.options import add_flags, add_model, from_flags
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.cli.terminal import Terminal
from ridgeline.data.workload import MIXES
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, INTERRUPTED_EXIT_CODE, UsageError
from ridgeline.hardware import detect
from ridgeline.ladder.climbing.budget import parse_duration
from ridgeline.ladder.climbing.check import check_folder
from ridgeline.ladder.climbing.climb import climb_model
from ridgeline.ladder.climbing.order import ClimbOrder, prepared, usual_measured
from ridgeline.ladder.climbing.preview import preview
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.reporting.folder import REPORT
from ridgeline.ladder.result import Climb
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quality.tasks import TASKS, TaskOptions

EXAMPLE = """\
ridgeline optimize demo --out demo-fast --budget 4m
ridgeline optimize ./model --out fast --for throughput --workload trace.csv --max-kl 0.01
ridgeline optimize --shape llama-3.1-8b --out fast --quality off --budget 8m
ridgeline optimize --check fast"""

ALL_TEXT = 1 << 30  # windows: as many as a given text has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new or empty folder (default: MODEL-optimized)"
    )
    parser.add_argument(
        "--for",
        dest="goal",
        choices=("latency", "throughput"),
        default="latency",
        help="requests one after the other, or all at once (default: %(default)s)",
    )
    parser.add_argument(
        "--workload",
        metavar="NAME",
        help=f"one of {', '.join(MIXES)}, or a file with a trace or with prompts; lengths and "
        "texts count, arrival times for --ttft-ms and --tpot-ms alone (default: batch-1 for "
        "latency; for throughput throughput on a GPU, cpu on a CPU)",
    )
    for flag, meaning in (("ttft", "until the first token"), ("tpot", "per token after it")):
        parser.add_argument(
            f"--{flag}-ms",
            type=float,
            metavar="MS",
            help=f"{meaning}: a rung is kept if {USUAL_SHARE:.0%}% of a trace's requests, coming "
            "at its own times, keep this",
        )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens made for each prompt of a file of prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="as 10m: rungs with the largest predicted gain first; what is left out is not reached",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=MIN_ROUNDS,
        metavar="N",
        help="rounds of a comparison, at least; an undecided one has more (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with a climb that was stopped, in --out"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only the rungs, with what each is predicted to give"
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="measure what a climb left there again; exit code 13 if speed or quality fell",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a small model of the same words: the rung that lets it draft tokens is tried",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: auto)")
    add_quality_arguments(parser)


def add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--quality",
        choices=("on", "off"),
        default="on",
        help="off: answers are not compared with the unmodified model's (default: %(default)s)",
    )
    quality.add_argument(
        "--text", type=Path, metavar="FILE", help="to measure on (default: Python's own help)"
    )
    quality.add_argument(
        "--window", type=int, metavar="N", help="tokens of a window (default: 1024; 256 on a CPU)"
    )
    quality.add_argument("--task", metavar="NAME", help=f"also a score: {', '.join(TASKS)}")
    quality.add_argument("--data", type=Path, metavar="FILE", help="its questions: JSON lines")
    quality.add_argument("--limit", type=int, metavar="N", help="the first N questions alone")
    quality.add_argument(
        "--shots", type=int, default=0, metavar="N", help="gsm8k: examples before each question"
    )
    quality.add_argument("--examples", type=Path, metavar="FILE", help="gsm8k: where they are from")
    quality.add_argument(
        "--run-code", action="store_true", help="humaneval: let what the model writes be run here"
    )
    add_flags(parser, QualityBounds)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.check is not None:
        return run_check(args, terminal)
    order = asked_order(args)
    with terminal.progress() as progress:
        if args.dry_run:
            return {"kind": "preview", **preview(prepared(order, progress))}
        climb = climb_model(order, progress)
    stopped = any(note.startswith("stopped by") for note in climb.notes)
    return {
        "kind": "climb",
        "out": str(order.out),
        "report": str(order.out / REPORT),
        "stopped": stopped,
        "climb": climb.to_json(),
    }


def run_check(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    for name in ("model", "shape", "out"):
        if getattr(args, name) is not None:
            raise UsageError(f"--check takes the folder alone; leave {name} out")
    with terminal.progress() as progress:
        about = {"device": args.device, "rounds": args.rounds, "quality": args.quality == "on"}
        checked = check_folder(args.check, **about, progress=progress)
    return {"kind": "check", "passed": not checked.problems, **checked.to_json()}


def asked_order(args: argparse.Namespace) -> ClimbOrder:
    given: QualityBounds = from_flags(args, QualityBounds)
    quality = args.quality == "on"
    if not quality and (given.are_given or args.text or args.task):
        raise UsageError(
            "--max-kl, --max-ppl-increase, --text and --task are about quality, which is off"
        )
    options = TaskOptions(args.limit, args.shots, args.examples, args.run_code)
    check_task_flags(args, options)
    if args.text is not None and not args.text.is_file():
        raise UsageError(f"there is no file {str(args.text)!r}; give a text")
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
        word = "run it" if climb.serve_command[1:2] == ("bench",) else "serve it"
        console.print(f"{word}: {shlex.join(climb.serve_command)}", markup=False, soft_wrap=True)


def render_check(result: dict[str, Any], console: Console) -> None:
    speed = result["speed"]
    interval = f"{speed['low']:.2f} to {speed['high']:.2f}"
    console.print(f"speed: {speed['value']:.2f} of the record ({interval})")
    if result["quality"] is not None:
        now, before = result["quality"]["mean_kl"], result["quality_before"]["mean_kl"]
        console.print(f"mean KL: {now:.5f}, was {before:.5f}")
    for line in (*result["remarks"], *result["problems"]):
        console.print(line, markup=False)
    console.print("as it was" if result["passed"] else "worse than the record")


def render_preview(result: dict[str, Any], console: Console) -> None:
    console.print(f"{result['model']} on {result['device']}; workload {result['workload']}")
    for entry in result["rungs"]:
        predicted = entry["predicted"]
        gain = "" if predicted is None else f"{predicted['speedup']:.2f}x"
        line = f"{gain:>8}  {entry['title']}: {entry['reason']}"
        console.print(line, markup=False, soft_wrap=True)
    console.print(result["note"], markup=False)
