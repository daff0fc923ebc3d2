"""TrainConfig: one training run as it was ordered, from its data to its seed.

Small parts that hold each other, each checked when it is made; nothing is changed in place. What is
left open is filled in by `with_auto` once the device is known, and by choices.py. A run folder
holds it as `train.json` (config_file.py); a named run (configs/) is a function that returns one;
flags change single fields.

    config = TrainConfig(model="demo", data=DataOptions("book.txt"), end=RunLength(steps=100))
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ridgeline.errors import UsageError, answers_wrong_options
from ridgeline.formats.fields import check_fields, field_help, flag_of
from ridgeline.models.shapes import check_one
from ridgeline.parallel.layout import Layout, divisor_below
from ridgeline.training.methods.options import DistillOptions, LoraOptions, QatOptions
from ridgeline.training.methods.under_layout import check_under_layout

Precision = Literal[
    "auto", "fp32", "tf32", "bf16", "bf16-stochastic", "bf16-nearest", "fp16", "fp8", "fp8-row"
]
Recomputation = Literal["auto", "none", "elementwise", "attention", "blocks"]
Moments = Literal["auto", "fp32", "bf16", "8-bit"]
Decay = Literal["constant", "linear", "cosine"]

PYTHON_ONLY = {"python_only": True}
USUAL_SEQUENCES = 8  # in a step; what else is usual is choices.py's


@answers_wrong_options()
@dataclass(frozen=True)
class DataOptions:
    """The text that is learned."""

    path: str | None = field(
        default=None, metadata=field_help("text to train on: a file or a folder", flag="data")
    )
    sequence_length: int = field(
        default=512, metadata=field_help("tokens in a sequence", minimum=2)
    )
    held_out: float = field(
        default=0.05,
        metadata=field_help(
            "share of the text that is not learned but measured on", minimum=0.0, maximum=0.5
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_finite(self)


@answers_wrong_options()
@dataclass(frozen=True)
class BatchOptions:
    """How many sequences make a step."""

    sequences: int | None = field(
        default=None,
        metadata=field_help(
            "sequences in a step (default: 8, fewer where --minutes are short for this machine)",
            flag="batch",
            minimum=1,
        ),
    )
    micro: int | None = field(
        default=None,
        metadata=field_help(
            "sequences in one forward pass; the batch is several of them "
            "(default: as many as fit, up to 2048 tokens on a CPU, 16384 on a GPU)",
            flag="micro-batch",
            minimum=1,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.micro is not None and self.size % self.micro:
            near = divisor_below(self.size, self.micro)
            raise UsageError(
                f"micro_batch is {self.micro}, which does not divide the batch of "
                f"{self.size} sequences; try {near}"
            )

    @property
    def size(self) -> int:
        """The usual one while it is left open."""
        return USUAL_SEQUENCES if self.sequences is None else self.sequences


@answers_wrong_options()
@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW."""

    lr: float = field(
        default=1e-4, metadata=field_help("learning rate at its highest", minimum=0.0, maximum=1e3)
    )
    beta1: float = field(
        default=0.9,
        metadata=field_help("decay of the mean of gradients", minimum=0.0, maximum=0.9999999),
    )
    beta2: float = field(
        default=0.95,
        metadata=field_help("decay of the mean of their squares", minimum=0.0, maximum=0.9999999),
    )
    eps: float = field(
        default=1e-8, metadata=field_help("added to the root of that mean", minimum=1e-30)
    )
    weight_decay: float = field(
        default=0.0,
        metadata=field_help(
            "share of lr by which matrices shrink each step; norms and biases never do", minimum=0.0
        ),
    )
    max_norm: float | None = field(
        default=1.0,
        metadata=field_help("gradients with a larger norm are scaled down to it", minimum=1e-30),
    )
    moments: Moments = field(
        default="auto",
        metadata=field_help(
            "what AdamW keeps its two means in (auto: fp32 with fp32 weights, else bf16)"
        ),
    )
    max_lost: float = field(
        default=0.5,
        metadata=field_help(
            "share of updates that rounding may throw away before the run stops",
            minimum=0.0,
            maximum=1.0,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_finite(self)


@answers_wrong_options()
@dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate over the run."""

    decay: Decay = field(
        default="cosine",
        metadata=field_help("how the learning rate falls after the warm-up", flag="schedule"),
    )
    warmup: int | None = field(
        default=None,
        metadata=field_help(
            "steps in which it rises from 0 (default: 10, fewer where --minutes are short)",
            minimum=0,
        ),
    )
    final: float = field(
        default=0.1,
        metadata=field_help(
            "share of it that is left at the end", flag="final-lr", minimum=0.0, maximum=1.0
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_finite(self)


@answers_wrong_options()
@dataclass(frozen=True)
class RunLength:
    """When a run ends: one of the three."""

    steps: int | None = field(default=None, metadata=field_help("stop after N steps", minimum=1))
    minutes: float | None = field(
        default=None, metadata=field_help("stop after this time", minimum=0.001)
    )
    tokens: int | None = field(
        default=None, metadata=field_help("stop after learning N tokens", minimum=1)
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_finite(self)
        given = [name for name, value in asdict(self).items() if value is not None]
        if len(given) > 1:
            names = " and ".join(f"--{name}" for name in given)
            raise UsageError(f"{names} are given; a run ends by one of them")

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in asdict(self).values())


@answers_wrong_options()
@dataclass(frozen=True)
class EvaluationOptions:
    """Loss on text that is not learned."""

    every: int = field(
        default=100,
        metadata=field_help(
            "steps between measurements of held-out loss; also at both ends", minimum=1,
            flag="eval-every",
        ),
    )  # fmt: skip
    sequences: int | None = field(
        default=None,
        metadata=field_help(
            "most held-out sequences that are measured (default: 32, and with --minutes what "
            "takes a tenth of the time at most)",
            flag="eval-sequences",
            minimum=1,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@answers_wrong_options()
@dataclass(frozen=True)
class CheckpointOptions:
    """What is written while it runs."""

    every: int | None = field(
        default=None,
        metadata=field_help(
            "steps between checkpoints; also at the end (default: 500, and with --minutes no more "
            "than ten minutes of steps)",
            flag="save-every",
            minimum=1,
        ),
    )
    keep: int = field(
        default=2, metadata=field_help("checkpoints kept; older ones are removed", minimum=1)
    )
    on_failure: Literal["stop", "continue"] = field(
        default="stop",
        metadata=field_help(
            "if a checkpoint between cannot be written, such as on a full disk", flag="save-failure"
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@answers_wrong_options()
@dataclass(frozen=True)
class WatchOptions:
    """Steps that look wrong. They are run a second time, to tell data from hardware."""

    non_finite: Literal["stop", "skip"] = field(
        default="stop",
        metadata=field_help("if a step's loss or gradients are not numbers: such a step changes "
                            "nothing"),
    )  # fmt: skip
    spikes: Literal["skip", "stop", "learn"] = field(
        default="skip",
        metadata=field_help("if a step's gradient norm or loss is far above those before it"),
    )
    spike_factor: float = field(
        default=10.0,
        metadata=field_help(
            "how far: times the median norm of the last 50 steps, or times their losses' median "
            "distance from their median",
            minimum=1.0,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _check_finite(self)


@answers_wrong_options(
    DataOptions, BatchOptions, OptimizerOptions, ScheduleOptions, RunLength, EvaluationOptions,
    CheckpointOptions, WatchOptions, LoraOptions, QatOptions, DistillOptions, Layout,
)  # fmt: skip
@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    model: str | None = field(default=None, metadata=PYTHON_ONLY)  # where its weights come from
    shape: str | None = field(default=None, metadata=PYTHON_ONLY)  # or random weights of a shape
    tokenizer: str | None = field(
        default=None,
        metadata=field_help("with --shape: the model whose tokenizer is used"),
    )
    precision: Precision = field(
        default="auto",
        metadata=field_help(
            "bf16 keeps exact fp32 weights in the optimizer; bf16-stochastic rounds by chance, "
            "bf16-nearest loses small updates; fp8 scales by tensor, fp8-row by row "
            "(auto: bf16 where the device is fast in it, else fp32)"
        ),
    )
    fp8_weight_gradients: Literal["fp8", "bf16"] = field(
        default="fp8",
        metadata=field_help("with fp8: what the products that give weights' gradients run in"),
    )
    recomputation: Recomputation = field(
        default="auto",
        metadata=field_help(
            "what is computed again in the backward pass instead of being kept: norms and "
            "activations (elementwise), attention too, or whole blocks (auto: as little as fits)"
        ),
    )
    compile: bool = field(
        default=False,
        metadata=field_help("norms and activations by torch.compile, not by Ridgeline's kernels"),
    )
    graphs: bool = field(
        default=False, metadata=field_help("forward and backward passes as CUDA graphs (bf16, fp8)")
    )
    deterministic: bool = field(
        default=False,
        metadata=field_help("sum attention's gradients in one order on a GPU: the same bits again"),
    )
    tensorboard: bool = field(
        default=False,
        metadata=field_help("write TensorBoard's event files too (RUN/tensorboard)"),
    )
    seed: int = field(
        default=0, metadata=field_help("of the order of sequences and of random weights", minimum=0)
    )
    data: DataOptions = field(default_factory=DataOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    end: RunLength = field(default_factory=RunLength)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    watch: WatchOptions = field(default_factory=WatchOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    qat: QatOptions = field(default_factory=QatOptions)
    distill: DistillOptions = field(default_factory=DistillOptions)
    layout: Layout = field(default_factory=Layout, metadata=PYTHON_ONLY)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.qat.is_given and self.lora.rank is not None:
            raise UsageError("--lora leaves weights as they are; remove --qat and --sparsity")
        if self.qat.is_given and self.precision.startswith("fp8"):
            raise UsageError("--qat and --sparsity need products in bf16; use --precision bf16")
        check_under_layout(self)

    @property
    def own_sequences(self) -> int:  # of a step, on each rank
        return self.batch.size // self.layout.size_of("data")

    @property
    def batch_tokens(self) -> int:
        return self.batch.size * self.data.sequence_length


def check_complete(config: TrainConfig) -> None:
    check_one(config.model, config.shape)
    if config.tokenizer is not None and config.shape is None:
        raise UsageError("--tokenizer goes with --shape; a model has its own")
    if config.lora.rank is not None and config.shape is not None:
        raise UsageError("--lora goes with a model; random weights of --shape need all of theirs")
    if config.data.path is None:
        raise UsageError("there is no text to train on; give --data FILE or a folder")
    if not config.end.is_given:
        raise UsageError("when does the run end? give --steps N, --minutes M or --tokens T")


def with_auto(config: TrainConfig, device: str) -> TrainConfig:
    """The config with a precision, for this device. Micro-batch and recomputation are chosen by the
    memory plan (memory.py).
    """
    import torch

    from ridgeline.products import product_dtype

    if config.precision != "auto":
        return config
    kind = "cpu" if device == "cpu" else "cuda"
    fast = product_dtype(torch.bfloat16, torch.device(kind)) == torch.bfloat16
    return replace(config, precision="bf16" if fast else "fp32")


def _check_finite(config: Any) -> None:
    """NaN passes every comparison with a range."""
    for name, entry in type(config).__dataclass_fields__.items():
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{flag_of(entry).replace('-', '_')} is {value}; give a number")
