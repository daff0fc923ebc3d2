"""Runs of `ridgeline train`.

ridgeline train configs:finetune_demo --data book.txt
"""

from __future__ import annotations

from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    OptimizerOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.training.methods.options import DistillOptions, LoraOptions, QatOptions


def finetune_demo() -> TrainConfig:
    """All weights of `demo` on a text of one's own: minutes on a CPU."""
    return TrainConfig(
        model="demo",
        data=DataOptions(sequence_length=256),
        optimizer=OptimizerOptions(lr=5e-5),
        end=RunLength(minutes=10),
    )


def lora_demo() -> TrainConfig:
    """Adapters of `demo`: a checkpoint is some megabytes, and the base stays as it is."""
    return TrainConfig(
        model="demo",
        data=DataOptions(sequence_length=256),
        optimizer=OptimizerOptions(lr=5e-4),
        end=RunLength(minutes=10),
        lora=LoraOptions(rank=16),
    )


def qat_demo() -> TrainConfig:
    """`demo` with weights that round well to 4 bits, taught by itself as it was."""
    return TrainConfig(
        model="demo",
        data=DataOptions(sequence_length=256),
        optimizer=OptimizerOptions(lr=2e-5),
        end=RunLength(minutes=10),
        qat=QatOptions("int4-g64"),
        distill=DistillOptions("demo"),
    )


def pretrain_tiny() -> TrainConfig:
    """A small model from nothing, with the tokenizer of `demo`."""
    return TrainConfig(
        shape="tiny",
        tokenizer="demo",
        data=DataOptions(sequence_length=256),
        batch=BatchOptions(sequences=32),
        optimizer=OptimizerOptions(lr=3e-3, weight_decay=0.1),
        schedule=ScheduleOptions("cosine", warmup=50),
        end=RunLength(steps=500),
    )
