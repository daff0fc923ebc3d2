"""Quality that rounding lost, learned back: training begins with the codes that a method chose, and
ends with codes.

Weights start inside of the bin of their code, as near as that allows to what they were; they and
the scales learn the probabilities of the unmodified model through training's own step
(training/methods/rounded.py, training/stepping/distillation.py), for as long as is given.
Everything else stays as it is.

    codes = recover(plain, codes, original, tokenizer, RecoveryOptions(minutes=10))
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import default_text
from ridgeline.data.loading.loader import Loader
from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.split import SplitData, split_data
from ridgeline.data.loading.tokenizing import read_tokens
from ridgeline.errors import UnsupportedError, UsageError, answers_wrong_options
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.fields import check_fields, field_help
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import Linear
from ridgeline.progress import Progress
from ridgeline.quantization.calibrating.work import codes_on
from ridgeline.quantization.scheme import Codes, Scheme, decode, spread
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    OptimizerOptions,
    RunLength,
    ScheduleOptions,
    TrainConfig,
)
from ridgeline.training.methods.options import DistillOptions
from ridgeline.training.methods.rounded import RoundedWeights, Rounding
from ridgeline.training.schedule import Counters, learning_rate, share_done
from ridgeline.training.stepping.step import Trainer

LENGTH = 512  # tokens of a sequence
# Sequences of a step: a CPU takes seconds for one, and many small steps learn more than few large.
BATCHES = {"cpu": BatchOptions(1, 1), "cuda": BatchOptions(16, 8)}
MARGIN = 0.05  # of a bin: how far from its edge a weight starts
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}  # by the model's dtype


@answers_wrong_options()
@dataclass(frozen=True)
class RecoveryOptions:
    """Training of codes after they were found."""

    minutes: float | None = field(
        default=None,
        metadata=field_help(
            "train the codes for this long to answer as the original does", flag="recover",
            minimum=0.001,
        ),
    )  # fmt: skip
    data: str | None = field(
        default=None,
        metadata=field_help(
            "text to train them on, a file or a folder: not that of --text "
            "(default: the calibration text)",
            flag="recover-data",
        ),
    )
    lr: float = field(
        default=5e-5,
        metadata=field_help("its learning rate", flag="recover-lr", minimum=0.0, maximum=1.0),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.data is not None and self.minutes is None:
            raise UsageError("--recover-data needs --recover MINUTES")


@dataclass(frozen=True)
class RecoveryReport:
    """What training did."""

    steps: int
    tokens: int
    seconds: float
    divergence: tuple[float, float]  # from the original, in nats: of the first and last steps


@dataclass(frozen=True)
class Recovered:
    codes: dict[str, tuple[Codes, Scheme]]
    report: RecoveryReport


def recover(
    plain: Transformer,
    codes: Mapping[str, tuple[Codes, Scheme]],
    original: Transformer,
    tokenizer: Tokenizer,
    options: RecoveryOptions,
    *,
    calibration: str | None = None,
    progress: Progress | None = None,
) -> Recovered:
    """`plain` is the model around the codes. Nothing that is given is changed."""
    assert options.minutes is not None, "who asks for it says how long"
    device = original.embed.weight.device
    student, rounded = student_of(plain, codes, original)
    config = recovery_config(options, original)
    learned = {name: each.weight_OD for name, each in rounded.roundings.items()}
    trainer = Trainer(
        student, config, learned | rounded.scales(), rounded=rounded, teacher=original
    )
    with tempfile.TemporaryDirectory() as folder:
        data = recovery_data(options, calibration, tokenizer, original, Path(folder), progress)
        report = learn(trainer, config, data, str(device), progress)
    return Recovered(
        {
            name.removesuffix(".weight"): (_detached(each.codes()), codes_scheme(each))
            for name, each in rounded.roundings.items()
        },
        report,
    )


def recovery_config(options: RecoveryOptions, original: Transformer) -> TrainConfig:
    dtype = dtype_name(original.embed.weight.dtype)
    length = min(LENGTH, original.config.max_context)
    return TrainConfig(
        precision=PRECISIONS[dtype],  # type: ignore[arg-type]
        recomputation="elementwise",
        data=DataOptions(sequence_length=length, held_out=0.0),
        batch=BATCHES[original.embed.weight.device.type],
        optimizer=OptimizerOptions(lr=options.lr, max_lost=1.0),
        schedule=ScheduleOptions("cosine", warmup=5, final=0.05),
        end=RunLength(minutes=options.minutes),
        distill=DistillOptions("original"),
    )


def student_of(
    plain: Transformer, codes: Mapping[str, tuple[Codes, Scheme]], original: Transformer
) -> tuple[Transformer, RoundedWeights]:
    """A copy that shares all but the projections that have codes."""
    if any(layer.experts for layer in plain.config.layers):
        raise UnsupportedError("--recover does not train mixtures of experts yet")
    student = with_kinds(plain, lambda kind: kind).requires_grad_(False)
    device = original.embed.weight.device
    roundings: dict[str, Rounding] = {}
    for name, (given, scheme) in codes.items():
        assert scheme.inputs == "16-bit", "inputs are not rounded in training"
        parent_name, _, own_name = name.rpartition(".")
        parent = student.get_submodule(parent_name)
        before: Linear = getattr(parent, own_name)
        there = codes_on(given, device)
        layer = with_kinds(before, lambda kind: kind)
        weight_OD = starting_weight(before.weight.detach(), there, scheme)
        layer.weight = nn.Parameter(weight_OD)
        setattr(parent, own_name, layer)
        scale = nn.Parameter(there.grid.scale.float().clone())
        roundings[f"{name}.weight"] = Rounding(layer.weight, scheme, scale, there.grid.zero)
    return student, RoundedWeights(roundings)


def starting_weight(weight_OD: Tensor, codes: Codes, scheme: Scheme) -> Tensor:
    """In fp32: what the weight was, moved into the bin of its code."""
    middle_OD = decode(codes, scheme)
    if scheme.weight == "fp8":
        return middle_OD
    reach_OD = (0.5 - MARGIN) * spread(codes.grid.scale, weight_OD.shape)
    return torch.clamp(weight_OD.float(), middle_OD - reach_OD, middle_OD + reach_OD)


def recovery_data(
    options: RecoveryOptions,
    calibration: str | None,
    tokenizer: Tokenizer,
    model: Transformer,
    folder: Path,
    progress: Progress | None,
) -> SplitData:
    if options.data is None:
        path = folder / "calibration.txt"
        path.write_text(default_text() if calibration is None else calibration, encoding="utf-8")
    else:
        path = Path(options.data)
    tokenized = read_tokens([path], tokenizer, progress)
    return split_data(
        tokenized.store,
        sequence_length=min(LENGTH, model.config.max_context),
        vocab_size=model.config.vocab_size,
        held_out=0.0,
    )


def learn(
    trainer: Trainer,
    config: TrainConfig,
    data: SplitData,
    device: str,
    progress: Progress | None,
) -> RecoveryReport:
    """Steps until the config's end."""
    micro = config.batch.micro
    assert micro is not None, "recovery_config"
    counters, losses, begun = Counters(), list[float](), time.perf_counter()
    with Loader(data.train, DataState(config.seed, 0), sequences=micro, device=device) as loader:
        while (done := share_done(config.end, counters)) < 1:
            lr = learning_rate(config.optimizer.lr, config.schedule, counters.steps, done)
            result = trainer.step(list(islice(loader, config.batch.size // micro)), lr)
            result.check()
            losses.append(result.loss)
            counters = Counters(
                counters.steps + 1,
                loader.state.consumed,
                counters.tokens + result.num_tokens,
                time.perf_counter() - begun,
            )
            if progress is not None:
                progress("recovering", round(100 * share_done(config.end, counters)), 100)
    few = max(1, min(10, len(losses) // 4))
    means = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return RecoveryReport(counters.steps, counters.tokens, counters.seconds, means)


def codes_scheme(rounding: Rounding) -> Scheme:
    assert rounding.scheme is not None, "codes have a scheme"
    return rounding.scheme


def _detached(codes: Codes) -> Codes:
    return Codes(codes.values.clone(), codes.grid._replace(scale=codes.grid.scale.clone()))
