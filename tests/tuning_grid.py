"""A full grid of tiny training runs on a CPU, each with its held-out loss at shares of its length:
what searches are replayed over (tuning_regret.py). Finished points are kept, so that it goes on
where it was stopped.

    PYTHONPATH=.:tests python -m tuning_grid --text tinyshakespeare.txt.gz --out grid.json
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from ridgeline.formats.files import atomic_write
from ridgeline.hardware import detect
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    EvaluationOptions,
    OptimizerOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.tuning.short_run import ShortRun, num_steps, plan_short

LENGTH, TOKENS, VOCABULARY = 64, 32 * 1024, 512
SHARES = (1 / 27, 1 / 18, 1 / 9, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 1.0)
AXES: dict[str, list[Any]] = {
    "lr": [float(f"{3e-4 * 10 ** (step / 4):.3g}") for step in range(12)],
    "batch": [4, 8, 16],
    "schedule": ["cosine", "linear", "constant"],
    "beta2": [0.9, 0.99],
}


def points() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*AXES.values()):
        yield dict(zip(AXES, values, strict=True))


def make_tokenizer(text: str, folder: Path) -> None:
    """A small one: a large head would be all of the work."""
    source = tokenizers.Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    source.train_from_iterator([text], trainer)
    source.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def config_of(point: dict[str, Any], text: Path, tokenizer: Path) -> TrainConfig:
    batch = point["batch"]
    return TrainConfig(
        shape="tiny",
        tokenizer=str(tokenizer),
        precision="fp32",
        data=DataOptions(str(text), LENGTH),
        batch=BatchOptions(batch, batch),
        optimizer=OptimizerOptions(lr=point["lr"], beta2=point["beta2"]),
        schedule=ScheduleOptions(point["schedule"], warmup=4),
        end=RunLength(steps=TOKENS // (batch * LENGTH)),
        evaluation=EvaluationOptions(sequences=128),
    )


def losses_of(config: TrainConfig, seed: int) -> list[float | None]:
    """Held out, at each share; None from where it is no number."""
    plan = plan_short(config, device="cpu")
    steps, result = num_steps(plan.config), list[float | None]()
    with ShortRun(plan, seed) as run:
        for share in SHARES:
            while run.num_done < max(1, round(share * steps)):
                if not math.isfinite(run.scheduled_step(steps)):
                    return [*result, *[None] * (len(SHARES) - len(result))]
            loss = run.held_out_loss()
            assert loss is not None
            result.append(round(loss, 5))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[float | None]] = {}
    if args.out.is_file():
        rows = json.loads(args.out.read_text())["losses"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = args.text.read_bytes()
        text = (gzip.decompress(data) if args.text.suffix == ".gz" else data).decode()
        (folder / "text.txt").write_text(text)
        make_tokenizer(text, folder)
        for point in points():
            key = json.dumps(point)
            if key in rows:
                continue
            config = config_of(point, folder / "text.txt", folder)
            rows[key] = losses_of(replace(config, seed=args.seed), args.seed)
            print(key, rows[key], flush=True)
            with atomic_write(args.out) as file:
                json.dump(document(rows, args), file, indent=1)
    return 0


def document(rows: dict[str, list[float | None]], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "what": f"held-out loss of the tiny shape on {args.text.name}, {TOKENS} tokens a run",
        "command": " ".join(["python -m tuning_grid", *sys.argv[1:]]),
        "device": detect("cpu").name,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": args.seed,
        "shares": SHARES,
        "losses": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
