"""Full grids of tiny training runs on a CPU, with held-out losses at shares of each run: what
searches are replayed over (tuning_regret.py). The search's constants were tried on `rates` and
`shapes`; `widths` and `warmups` have other text, other settings and another seed, and nothing was
chosen by them. Finished points are kept, so that it goes on where it was stopped.

    PYTHONPATH=.:tests python -m tuning_grid rates --text tinyshakespeare.txt.gz --out rates.json
    PYTHONPATH=.:tests python -m tuning_grid shapes --text code.txt.gz --seed 1 --out shapes.json
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
    DataOptions,
    EvaluationOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.training.prepare import PlannedRun
from ridgeline.tuning.network_shapes import Equal
from ridgeline.tuning.searching.config import SearchConfig, edited
from ridgeline.tuning.searching.space import OneOf, Point, SearchSpace
from ridgeline.tuning.short_run import ShortRun, num_steps, plan_short

LENGTH, VOCABULARY = 64, 512
TOKENS = {
    "rates": 32 * 1024,
    "shapes": 16 * 1024,
    "widths": 48 * 1024,
    "warmups": 24 * 1024,
}  # of a run
SHARES = (1 / 27, 1 / 9, 1 / 3, 1.0)
RATES = tuple(float(f"{3e-4 * 10 ** (step / 4):.3g}") for step in range(12))
TABLES: dict[str, tuple[SearchSpace, Equal]] = {
    "rates": (
        SearchSpace(
            (
                ("lr", OneOf(RATES)),
                ("batch", OneOf((4, 8, 16))),
                ("schedule", OneOf(("cosine", "linear", "constant"))),
                ("beta2", OneOf((0.9, 0.99))),
            )
        ),
        "free",
    ),
    "shapes": (
        SearchSpace(
            (
                ("lr", OneOf(RATES[1:10])),
                ("batch", OneOf((4, 8, 16))),
                ("layers", OneOf((1, 2, 3, 4))),
            )
        ),
        "parameters",
    ),
    "widths": (
        SearchSpace(
            (
                ("lr", OneOf(RATES[1:10])),
                ("width", OneOf((32, 64, 96))),
                ("beta1", OneOf((0.8, 0.9))),
                ("batch", OneOf((4, 16))),
            )
        ),
        "free",
    ),
    "warmups": (
        SearchSpace(
            (
                ("lr", OneOf(RATES[1:10])),
                ("batch", OneOf((2, 4, 8))),
                ("warmup", OneOf((2, 24))),
                ("weight-decay", OneOf((0.0, 0.5))),
            )
        ),
        "free",
    ),
}


def points(space: SearchSpace) -> Iterator[Point]:
    choices = [each.some(2) for _, each in space.entries]
    for values in itertools.product(*choices):
        yield dict(zip(space.names, values, strict=True))


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


def search_of(table: str, text: Path, tokenizer: Path) -> SearchConfig:
    space, equal = TABLES[table]
    base = TrainConfig(
        shape="tiny",
        tokenizer=str(tokenizer),
        precision="fp32",
        data=DataOptions(str(text), LENGTH),
        schedule=ScheduleOptions("cosine", warmup=4),
        end=RunLength(tokens=TOKENS[table]),
        evaluation=EvaluationOptions(sequences=128),
    )
    return SearchConfig(base, space, equal=equal)


def config_of(search: SearchConfig, point: Point) -> TrainConfig:
    """A whole number of steps; tokens of a document's end are not counted one by one."""
    config = edited(search, point)
    batch = replace(config.batch, micro=config.batch.size)
    assert config.end.tokens is not None, "search_of"
    steps = config.end.tokens // (batch.size * LENGTH)
    return replace(config, batch=batch, end=RunLength(steps=steps))


class GridPlans:
    """Text is read and cut once for all points that have batch and network in common."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str | None, int | None], PlannedRun] = {}

    def plan(self, config: TrainConfig) -> PlannedRun:
        key = (config.shape, config.batch.size)
        if key not in self._plans:
            self._plans[key] = plan_short(config, device="cpu")
        plan = self._plans[key]
        own = replace(plan.config, optimizer=config.optimizer, schedule=config.schedule)
        return replace(plan, config=own)


def losses_of(plan: PlannedRun, seed: int) -> list[float | None]:
    """Held out, at each share; None from where it is no number."""
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
    parser.add_argument("table", choices=TABLES)
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
        search, plans = search_of(args.table, folder / "text.txt", folder), GridPlans()
        for point in points(search.space):
            key = json.dumps(point)
            if key in rows:
                continue
            rows[key] = losses_of(plans.plan(config_of(search, point)), args.seed)
            print(key, rows[key], flush=True)
            with atomic_write(args.out) as file:
                json.dump(document(rows, args), file, indent=1)
    return 0


def document(rows: dict[str, list[float | None]], args: argparse.Namespace) -> dict[str, Any]:
    tokens = TOKENS[args.table]
    return {
        "what": f"held-out loss of the tiny shape on {args.text.name}, {tokens} tokens a run",
        "table": args.table,
        "command": " ".join(["python -m tuning_grid", *(Path(word).name for word in sys.argv[1:])]),
        "device": detect("cpu").name,
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": args.seed,
        "shares": SHARES,
        "losses": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
