"""A shape of about 30 M parameters from nothing, the same text and order in each precision: whether
what is learned is the same. One run a process; several fit on one GPU.

    PYTHONPATH=.:tests python -m training_gate run bf16 0 --data text --out gate    # seed 0
    PYTHONPATH=.:tests python -m training_gate table --out gate       # beside those in fp32

The loss of a run is the mean of its last tenth of steps. Precisions are compared with fp32 by
pairs of one seed; the noise of seeds is how fp32's own runs lie apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from ridgeline.cli import main as ridgeline
from ridgeline.models import shapes

SHAPE = "30m"
STEPS = 2000


def run(args: argparse.Namespace) -> int:
    shapes.SHAPES[SHAPE] = shapes._shape(
        "Llama", 384, 8, (6, 2), 1024, 49152, 2048, tie_word_embeddings=True
    )
    folder = args.out / f"{args.precision}-{args.seed}"
    words = [
        "train", "--shape", SHAPE, "--tokenizer", args.tokenizer, "--data", str(args.data),
        "--out", str(folder), "--precision", args.precision, "--seed", str(args.seed),
        "--steps", str(args.steps), "--batch", "8", "--sequence-length", "512", "--lr", "1e-3",
        "--warmup", "100", "--weight-decay", "0.1", "--eval-every", "500",
        "--save-every", str(args.steps), "--max-lost", "1.0",
    ]  # fmt: skip
    return ridgeline(words)


def losses(folder: Path) -> tuple[float, float]:
    """Of the last tenth of steps, and of the held-out text at the end."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["loss"] for line in lines if "loss" in line and "lr" in line]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    return statistics.fmean(steps[-max(1, len(steps) // 10) :]), held_out[-1]


def table(out: Path) -> None:
    results = {each.name: losses(each) for each in sorted(out.iterdir()) if each.is_dir()}
    for name, (loss, held_out) in results.items():
        seed = name.rpartition("-")[2]
        beside = results.get(f"fp32-{seed}")
        over = None if beside is None else round(100 * (loss / beside[0] - 1), 3)
        held = None if beside is None else round(100 * (held_out / beside[1] - 1), 3)
        print(json.dumps({
            "run": name, "loss": round(loss, 5), "held_out": round(held_out, 5),
            "over_fp32_pct": over, "held_out_over_fp32_pct": held,
        }))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("precision")
    one.add_argument("seed", type=int)
    one.add_argument("--data", type=Path, required=True)
    one.add_argument("--tokenizer", default="demo")
    one.add_argument("--steps", type=int, default=STEPS)
    for each in (one, commands.add_parser("table")):
        each.add_argument("--out", type=Path, default=Path("gate"))
    args = parser.parse_args()
    if args.command == "run":
        return run(args)
    table(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
