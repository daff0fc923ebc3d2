"""Training's memory plan, made before anything is loaded: what each part takes, and which
micro-batch and recomputation fit.

Arithmetic over the model's shape and the config. What the weights and the optimizer keep follows
from the precision (precision.py), what a step holds at its peak is step_memory.py's. A remedy is
never a guess: the plan was made again with it, and fitted.

    plan = plan_training(model_config, config, "cuda:0", available_memory("cuda:0"))
    plan.config.batch.micro, plan.config.recomputation      # as chosen
    for item in plan.items: print(item.name, human_bytes(item.num_bytes), item.meaning)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from ridgeline.errors import OutOfMemoryError
from ridgeline.formats.fields import dotted_fields, flag_of
from ridgeline.hardware.memory_items import MemoryItem, listed, total_bytes
from ridgeline.hardware.units import human_bytes
from ridgeline.kernels.adamw.state import BLOCK
from ridgeline.models import ModelConfig
from ridgeline.models.cost import layer_matrices
from ridgeline.models.training_cost import LEVELS
from ridgeline.parallel.bubbles import check_micro_batches, fits_pipeline
from ridgeline.products import PIECE, product_dtype
from ridgeline.training.config import Moments, Precision, Recomputation, TrainConfig
from ridgeline.training.memory.methods import (
    TrainingMethod,
    decoding_bytes,
    frozen_items,
    num_plain,
    rounded_items,
    rounding_bytes,
    teacher_items,
)
from ridgeline.training.memory.ranks import RankShare, rank_shares
from ridgeline.training.memory.step import StepMoment, StepSize, peak
from ridgeline.training.stepping.precision import PRECISIONS, PrecisionPlan

# Tokens of one forward pass: enough rows for products to run at full speed, and so few that less
# recomputation is worth no further cut.
USUAL_TOKENS = {"cpu": 2048, "cuda": 16_384}
LEAST_TOKENS = {"cpu": 512, "cuda": 4096}
# Scratch of libraries: cuBLAS's on sm_90 and cuDNN's; on a CPU what products keep.
WORKSPACE_BYTES = {"cpu": 3 * 4 * PIECE, "cuda": 128 << 20}
# Of kernels and libraries that are loaded when they are first used. torch does not count it.
LOADED_BYTES = {"cpu": 0, "cuda": 768 << 20}
# Blocks that were freed do not always fit what comes next: 0 to 2% with blocks that grow
# (hardware/allocator.py; 34 steps on an H200, 2026-11-19).
SLACK = {"cpu": 0.0, "cuda": 0.01}
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "8-bit": 2.0 + 2 * 4 / BLOCK}
SHORTEST = 128  # tokens of a sequence that a remedy may advise
ALL_WEIGHTS = TrainingMethod()


@dataclass(frozen=True)
class TrainingMemory:
    """What one device holds at a step's peak."""

    config: TrainConfig  # with micro-batch and recomputation chosen
    free_bytes: int  # before anything is loaded
    items: tuple[MemoryItem, ...]
    moment: str  # of the step that holds most

    @property
    def used_bytes(self) -> int:
        return total_bytes(self.items)

    @property
    def reserved_bytes(self) -> int:
        """Of it, what torch's allocator takes."""
        return total_bytes(item for item in self.items if item.name != "libraries")

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.free_bytes


def plan_training(
    model: ModelConfig,
    config: TrainConfig,
    device: str,
    free_bytes: int,
    method: TrainingMethod = ALL_WEIGHTS,
) -> TrainingMemory:
    """The plan with the least recomputation that fits, and of that the micro-batch nearest to the
    usual one; or OutOfMemoryError, item by item, with a remedy.
    """
    plan, fitting = None, None
    for choice in choices(config, kind_of(device)):
        plan = itemise(model, choice, device, free_bytes, method)
        if plan.fits:
            fitting = plan
            break
    if fitting is not None:
        return fitting
    assert plan is not None, "there is always a choice"

    def fits(changed: TrainConfig) -> bool:
        kind = kind_of(device)
        return any(
            itemise(model, each, device, free_bytes, method).fits for each in choices(changed, kind)
        )

    raise OutOfMemoryError(_shortage(plan) + _remedy(config, plan, fits))


def kind_of(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"


def choices(config: TrainConfig, kind: str) -> Iterator[TrainConfig]:
    """What may be left open, filled in, from the fastest to the smallest: with little recomputation
    passes may be cut to LEAST_TOKENS, and further only where nothing else helps.
    """
    given = config.recomputation
    levels: tuple[Recomputation, ...] = tuple(
        level for level in get_args(Recomputation) if level in LEVELS and given in ("auto", level)
    )
    sizes = _micro_batches(config, kind)
    enough = [size for size in sizes if _tokens(config, size) >= LEAST_TOKENS[kind]] or sizes[:1]
    for tried in (enough, [size for size in sizes if size not in enough]):
        for level in levels:
            for size in tried:
                batch = replace(config.batch, micro=size)
                yield replace(config, recomputation=level, batch=batch)


def _tokens(config: TrainConfig, micro: int) -> int:
    return micro * config.data.sequence_length


def _micro_batches(config: TrainConfig, kind: str) -> list[int]:
    """Divisors of the batch, from the usual one downward."""
    if config.batch.micro is not None:
        return [config.batch.micro]
    total, most = config.own_sequences, USUAL_TOKENS[kind]
    divisors = [size for size in range(total, 0, -1) if total % size == 0]
    if config.layout.pipeline > 1:
        divisors = [size for size in divisors if fits_pipeline(config.layout, total // size)]
        if not divisors:  # says what would
            check_micro_batches(config.layout, total)
    return [size for size in divisors if size == 1 or _tokens(config, size) <= most]


def itemise(
    model: ModelConfig,
    config: TrainConfig,
    device: str,
    free_bytes: int,
    method: TrainingMethod = ALL_WEIGHTS,
) -> TrainingMemory:
    """The plan, whether it fits or not. Nothing of the config is open. Of several ranks that of the
    one that holds most.
    """
    plans = itemise_stages(model, config, device, free_bytes, method)
    return max(plans, key=lambda plan: plan.used_bytes)


def itemise_stages(
    model: ModelConfig,
    config: TrainConfig,
    device: str,
    free_bytes: int,
    method: TrainingMethod = ALL_WEIGHTS,
    devices: Collection[int] | None = None,
) -> list[TrainingMemory]:
    """Of one rank of each device along the pipeline, or of those named alone."""
    if config.layout.is_single:
        return [_itemised(model, config, device, free_bytes, method)]
    return [
        _itemised(model, config, device, free_bytes, method, share)
        for share in rank_shares(model, config, devices)
    ]


def _itemised(
    model: ModelConfig,
    config: TrainConfig,
    device: str,
    free_bytes: int,
    method: TrainingMethod,
    share: RankShare | None = None,
) -> TrainingMemory:
    kind = kind_of(device)
    precision = PRECISIONS[config.precision].with_moments(config.optimizer.moments)
    size = step_size(model, config, kind, method)
    if share is not None:
        size = replace(
            size,
            config=share.model,
            num_tokens=size.num_tokens // config.layout.context,
            num_held=share.num_held,
            in_flight=share.passes_in_flight,
            stream_share=share.stream_share,
            sums_always=share.sums_always,
            context=config.layout.context,
            expert_room=0.0 if config.layout.expert == 1 else config.layout.capacity or 1.0,
            has_table=share.has_table,
            has_head=share.has_head,
            is_head_cut=config.layout.tensor > 1,
        )
    moment = peak(size)
    items = [*_weight_items(size, precision, method, config.layout.shard)]
    items += _learned_items(size.num_learned, precision)
    if config.qat.is_given:
        items += rounded_items(model, precision.dtype, config.qat, config.layout.shard)
    items += teacher_items(method.teacher, precision.dtype)
    if share is not None and (method.adapters is None or config.layout.shard > 1):
        items += _gathered_items(share, precision, is_frozen=method.adapters is not None)
    items += _step_items(size, moment)
    items.append(
        MemoryItem("workspace", WORKSPACE_BYTES[kind], "scratch of libraries and kernels, at most")
    )
    if SLACK[kind]:
        slack = int(SLACK[kind] * total_bytes(items))
        items.append(MemoryItem("allocator", slack, "rounding, and free blocks that fit nothing"))
    if LOADED_BYTES[kind]:
        items.append(
            MemoryItem("libraries", LOADED_BYTES[kind], "kernels that are loaded when first used")
        )
    kept = tuple(item for item in items if item.num_bytes)
    return TrainingMemory(config, free_bytes, kept, moment.name)


def step_size(
    model: ModelConfig, config: TrainConfig, kind: str, method: TrainingMethod = ALL_WEIGHTS
) -> StepSize:
    precision = PRECISIONS[config.precision].with_moments(config.optimizer.moments)
    micro, dtype, on_gpu = config.batch.micro, precision.dtype, kind == "cuda"
    assert micro is not None, "choices"
    return StepSize(
        model,
        dtype,
        config.recomputation,
        num_tokens=_tokens(config, micro),
        num_passes=config.own_sequences // micro,
        longest=config.data.sequence_length,
        on_gpu=on_gpu,
        fp8=precision.fp8 is not None,
        keeps_codes=config.fp8_weight_gradients == "fp8",
        product_dtype=product_dtype(dtype, torch.device(kind)),
        moments=precision.format.moments,
        adapters=method.adapters,
        decoding=decoding_bytes(model, dtype, method.codes, on_gpu),
        rounding=rounding_bytes(model, dtype, config.qat),
        teacher=method.teacher,
        learns_text=config.distill.weight < 1.0,
    )


def _weight_items(
    size: StepSize, precision: PrecisionPlan, method: TrainingMethod, shards: int
) -> Iterator[MemoryItem]:
    """What a step computes with: the model, and adapters. Of a frozen model there are so many
    parts.
    """
    dtype, learned, model = precision.dtype, "weights", size.config
    if method.adapters is not None:
        yield from frozen_items(model, dtype, method.codes, size.on_gpu, shards)
        learned = "adapters"
    count, name = size.num_learned, str(dtype).removeprefix("torch.")
    yield MemoryItem(learned, count * dtype.itemsize, f"{_short(count)} parameters in {name}")
    if precision.fp8 is None:
        return
    matrices = sum(layer_matrices(model, layer) for layer in model.layers)
    if method.adapters is not None:
        matrices = num_plain(model, method.codes)
    yield MemoryItem("fp8 weights", 2 * matrices, "the layers' codes, both ways round")


def _learned_items(count: int, precision: PrecisionPlan) -> Iterator[MemoryItem]:
    """What the optimizer keeps from step to step."""
    format = precision.format
    if precision.has_copies:
        yield MemoryItem("masters", 4 * count, "the same in fp32, which the optimizer changes")
    if format.weight == "exact":
        yield MemoryItem("remainders", 2 * count, "the 16 bits that fp32 has and bf16 lacks")
    moments = int(MOMENT_BYTES[format.moments] * count)
    yield MemoryItem("moments", moments, f"AdamW's two means in {format.moments}")


def _gathered_items(
    share: RankShare, precision: PrecisionPlan, *, is_frozen: bool
) -> Iterator[MemoryItem]:
    """What `fully_shard` puts together for a pass."""
    gathered = share.num_gathered * precision.dtype.itemsize
    yield MemoryItem(
        "gathered weights", gathered, "two layers (in a pipeline all), embedding and head, whole"
    )
    sums = 0 if is_frozen else share.num_under_way * (4 + precision.dtype.itemsize)
    yield MemoryItem("sums", sums, "their gradients until they are shared out, in fp32")


def _step_items(size: StepSize, moment: StepMoment) -> Iterator[MemoryItem]:
    """What a step holds at the moment at which it holds most."""
    tokens = f"{size.num_tokens:,} tokens"
    several = f"of {size.num_passes} passes, " if size.num_passes > 1 else ""
    many = f"{several}summed in fp32"
    when = {"loss": "the last one's", "head's gradient": "the last one's"}
    single = f"in {size.element * 8} bits; at the peak {when.get(moment.name, 'nearly all')}"
    yield MemoryItem("gradients", moment.gradients, many if size.has_sums else single)
    kept = f"kept of {tokens} for the backward pass (recomputation {size.recomputation})"
    yield MemoryItem("activations", moment.activations, kept)
    yield MemoryItem("loss", moment.loss, "logits of some rows, the head's gradient in fp32")
    yield MemoryItem("step", moment.working, f"tensors of the moment, which is {moment.name}")
    yield MemoryItem("batches", size.batches, "token ids that were read ahead")


def _short(count: int) -> str:
    """`1.24 B`."""
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _shortage(plan: TrainingMemory) -> str:
    needed, free = human_bytes(plan.used_bytes), human_bytes(plan.free_bytes)
    return f"needs {needed} ({listed(plan.items)}), and {free} are free; "


def _remedy(config: TrainConfig, plan: TrainingMemory, fits: Callable[[TrainConfig], bool]) -> str:
    """One change that fits, the mildest there is."""
    for changed in remedies(config):
        if fits(changed):
            return _in_words(config, changed)
    wanted = human_bytes(int(1.01 * plan.used_bytes))
    return f"no setting helps; use a smaller model, or a device with {wanted} free"


def remedies(config: TrainConfig) -> Iterator[TrainConfig]:
    """Configs that take less, the mildest first."""
    opened = replace(config, recomputation="auto")
    if config.recomputation != "auto":
        start = LEVELS.index(config.recomputation) + 1
        for level in LEVELS[start:]:
            yield _changed(config, recomputation=level)
    if config.batch.micro is not None:
        for micro in range(config.batch.micro - 1, 0, -1):
            if config.own_sequences % micro == 0:
                yield replace(config, batch=replace(config.batch, micro=micro))
    smaller = replace(opened, batch=replace(config.batch, micro=None))
    if config.precision in ("fp32", "tf32"):
        yield replace(smaller, precision="bf16")
    moments: Moments = "8-bit"
    small_moments = replace(smaller, optimizer=replace(config.optimizer, moments=moments))
    if config.optimizer.moments != moments:
        yield small_moments
    yield from _shorter(smaller)
    precision: Precision = "bf16-stochastic"
    if config.precision != precision:
        yield replace(small_moments, precision=precision)
    yield from _shorter(replace(small_moments, precision=precision))


def _changed(config: TrainConfig, **values: Any) -> TrainConfig:
    return replace(config, **values)


def _shorter(config: TrainConfig) -> Iterator[TrainConfig]:
    """With sequences cut in halves, of which there are more: as many tokens in a step."""
    length, factor = config.data.sequence_length // 2, 2
    while length >= SHORTEST:
        yield replace(
            config,
            data=replace(config.data, sequence_length=length),
            batch=replace(config.batch, sequences=factor * config.batch.size),
        )
        length, factor = length // 2, 2 * factor


def _in_words(config: TrainConfig, changed: TrainConfig) -> str:
    """`use --recomputation blocks and --batch 16`."""
    words = []
    for name, entry in dotted_fields(TrainConfig).items():
        value, before = _value(changed, name), _value(config, name)
        if value != before:
            flag = f"--{flag_of(entry)}"
            words.append(f"leave {flag} out" if value in (None, "auto") else f"use {flag} {value}")
    return " and ".join(words)


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config
