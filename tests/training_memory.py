"""The memory plan of a training step beside what a GPU holds: four shapes, each recomputation, two
sizes of a pass; each in a process of its own, several at once, for memory minds no company.

    PYTHONPATH=.:tests python -m training_memory --save results       # make gpu-training-memory
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from training_speed import batches_of, say

from ridgeline.hardware import detect
from ridgeline.hardware.allocator import grow_blocks
from ridgeline.models import build_model
from ridgeline.models.shapes import describe_shape
from ridgeline.models.training_cost import LEVELS
from ridgeline.records import Record, Value
from ridgeline.training.config import BatchOptions, DataOptions, Precision, TrainConfig
from ridgeline.training.initial import fill_initial
from ridgeline.training.memory.plan import itemise
from ridgeline.training.stepping.step import Trainer

DEVICE = "cuda:0"
SHAPES = {  # and the sequences of a pass
    "llama-3.2-1b": (2, 4),
    "qwen3-0.6b": (2, 4),
    "gemma-2-2b": (1, 2),
    "smollm2-1.7b": (1, 2),
}
SEQUENCES, LENGTH = 8, 4096
STEPS = 3
MUST = 0.03
FIGURES = ("planned", "allocated", "reserved")


@dataclass(frozen=True)
class Case:
    shape: str
    recomputation: str
    micro: int
    precision: Precision = "bf16"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.precision}, {self.recomputation}, {self.micro} sequences"


def cases() -> list[Case]:
    usual = [
        Case(shape, level, micro)
        for shape, sizes in SHAPES.items()
        for level in LEVELS
        for micro in sizes
    ]
    one_pass = [Case("llama-3.2-1b", level, SEQUENCES) for level in ("none", "elementwise")]
    return [*usual, *one_pass, *(replace(case, precision="fp8") for case in one_pass)]


def measured(case: Case) -> dict[str, Any]:
    """Of this process, which has done nothing else."""
    model_config = describe_shape(case.shape).config
    config: Any = TrainConfig(
        precision=case.precision,
        batch=BatchOptions(sequences=SEQUENCES, micro=case.micro),
        data=DataOptions(sequence_length=LENGTH),
    )
    config = replace(config, recomputation=case.recomputation)
    plan = itemise(model_config, config, DEVICE, 1 << 40)
    grows = grow_blocks(DEVICE)
    model = fill_initial(build_model(model_config, torch.float32, DEVICE), seed=0)
    trainer = Trainer(model, config)
    batches = batches_of(model_config, case.micro)
    for _ in range(STEPS):
        trainer.step(batches, lr=1e-4).check()
    torch.cuda.synchronize()
    return {
        "planned": plan.reserved_bytes,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "moment": plan.moment,
        "grows": grows,
        "items": {item.name: item.num_bytes for item in plan.items},
    }


def in_a_process(number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "training_memory", "--case", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        return {"error": done.stderr.strip()[-400:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, help="measure this one here")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names have this")
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    every = cases()
    if args.case is not None:
        print(json.dumps(measured(every[args.case])))
        return 0
    numbers = [number for number, case in enumerate(every) if args.only in case.name]
    values, worst = {}, 0.0
    with ThreadPoolExecutor(args.at_once) as pool:
        for number, found in zip(numbers, pool.map(in_a_process, numbers), strict=True):
            name = every[number].name
            if "error" in found:
                say(case=name, error=found["error"])
                worst = float("inf")
                continue
            off = found["planned"] / found["reserved"] - 1
            worst = max(worst, abs(off))
            gib = {
                key: round(found[key] / 2**30, 2) for key in ("planned", "allocated", "reserved")
            }
            say(case=name, **gib, off=f"{off:+.1%}", moment=found["moment"], items=found["items"])
            for key in ("planned", "allocated", "reserved"):
                values[f"{name}: {key}"] = Value(found[key], "B")
    say(worst=worst, good=worst <= MUST)
    if args.save is not None and values:
        command = ("training_memory", *sys.argv[1:])
        print(Record.create("training-memory", detect(DEVICE), values, command).save(args.save))
    return 0 if worst <= MUST else 1


if __name__ == "__main__":
    sys.exit(main())
