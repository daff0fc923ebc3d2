"""The work of one layer's passes and of the head's, on one rank: what training_work counts of a
whole step, split by when it is done. Kept, because searches ask for the same layer many times.

    work = layer_work(setup, model.layers[0])
    work.forward, work.inputs, work.weights     # ops of each pass
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.parallel.degrees import rank_config
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.profiling.predicting.training_work import LAYER_KERNELS, PlannedStep, WorkOp
from ridgeline.profiling.predicting.training_work import training_work as counted
from ridgeline.profiling.tracing.training_trace import AGAIN, BACKWARD
from ridgeline.training.config import Precision, Recomputation
from ridgeline.training.memory.step import StepSize
from ridgeline.training.stepping.precision import PRECISIONS

# Ops of a step that are no layer's. The last norm is left out: a layer has two.
OUTSIDE = ("head", "loss", "embedding", "others")
SHARED_BY_SEQUENCE = ("norms", "embedding")  # by tokens, over the ranks of `tensor`


UNITS: dict[str, Precision] = {"fp16": "fp16", "fp32": "fp32"}


@dataclass(frozen=True)
class PassWork:
    """Ops, and how many kernels they are."""

    forward: tuple[WorkOp, ...]
    inputs: tuple[WorkOp, ...]  # of the backward pass: what flows on, and what is made again
    weights: tuple[WorkOp, ...]
    num_kernels: int  # of all three


@dataclass(frozen=True)
class _Key:
    """All that a layer's work depends on."""

    model: ModelConfig  # its part on the rank, with one layer
    sequence: int
    micro: int
    context: int
    recomputation: Recomputation
    units: str
    stream_share: int  # ranks that share norms by tokens


def layer_work(setup: TrainSetup, layer: LayerConfig) -> PassWork:
    return _layer_work(_key(setup, layer))


def head_work(setup: TrainSetup) -> PassWork:
    """Of the embedding, the head and the loss."""
    return _head_work(_key(setup, setup.model.layers[0]))


def rank_model(setup: TrainSetup, layer: LayerConfig) -> ModelConfig:
    """The part of one layer that a rank computes with."""
    layout = setup.layout
    if layer.experts is not None and layout.expert > 1:
        held = layer.experts.num_experts // layout.expert
        layer = replace(layer, experts=replace(layer.experts, held=held))
    return _cut(replace(setup.model, layers=(layer,)), layout.tensor)


@lru_cache(maxsize=4096)
def _cut(model: ModelConfig, tensor: int) -> ModelConfig:
    return rank_config(model, tensor)


def _key(setup: TrainSetup, layer: LayerConfig) -> _Key:
    layout = setup.layout
    return _Key(
        rank_model(setup, layer),
        setup.sequence,
        setup.micro,
        layout.context,
        setup.recomputation,
        setup.units,
        layout.tensor if layout.sequence else 1,
    )


def _step_work(key: _Key, num_layers: int) -> list[WorkOp]:
    is_narrow = key.units in ("fp8", "fp4")
    precision = PRECISIONS["fp8" if is_narrow else UNITS.get(key.units, "bf16")]
    size = StepSize(
        replace(key.model, layers=key.model.layers * num_layers),
        precision.dtype,
        key.recomputation,
        num_tokens=key.micro * key.sequence // key.context,
        num_passes=1,
        longest=key.sequence,
        fp8=is_narrow,
    )
    step = PlannedStep(size, precision, (key.sequence,) * key.micro)
    return [_shared(op, key) for op in counted(step)]


def _shared(op: WorkOp, key: _Key) -> WorkOp:
    """As one of several ranks has it."""
    base = op.name.removesuffix(AGAIN).removesuffix(BACKWARD)
    if base == "attention":  # of whole documents; ranks of `context` have equal parts
        op = op._replace(flops=op.flops / key.context)
    if base in SHARED_BY_SEQUENCE:
        op = op._replace(num_bytes=op.num_bytes / key.stream_share)
    if op.units is not None and key.units == "fp4" and op.units == "fp8":
        op = op._replace(units="fp4")
    return op


@lru_cache(maxsize=4096)
def _layer_work(key: _Key) -> PassWork:
    one, two = _step_work(key, 1), _step_work(key, 2)
    assert [op.name for op in one] == [op.name for op in two]
    ops = [
        second._replace(
            flops=second.flops - first.flops, num_bytes=second.num_bytes - first.num_bytes
        )
        for first, second in zip(one, two, strict=True)
    ]
    kernels = LAYER_KERNELS["forward"] + LAYER_KERNELS["backward"]
    kernels += LAYER_KERNELS.get(key.recomputation, 0)
    own = [op for op in ops if _base(op) not in (*OUTSIDE, "optimizer")]
    return _by_pass([op for op in own if op.flops or op.num_bytes], kernels)


@lru_cache(maxsize=4096)
def _head_work(key: _Key) -> PassWork:
    ops = [op for op in _step_work(key, 1) if _base(op) in OUTSIDE]
    return _by_pass(ops, 2 * LAYER_KERNELS["forward"])


def _base(op: WorkOp) -> str:
    return op.name.removesuffix(AGAIN).removesuffix(BACKWARD)


def _by_pass(ops: Sequence[WorkOp], num_kernels: int) -> PassWork:
    forward: list[WorkOp] = []
    inputs: list[WorkOp] = []
    weights: list[WorkOp] = []
    names: set[str] = set()
    for op in ops:
        if op.name.endswith(AGAIN):
            inputs.append(op)
        elif op.name.endswith(BACKWARD):
            (weights if op.name in names else inputs).append(op)
            names.add(op.name)
        else:
            forward.append(op)
    return PassWork(tuple(forward), tuple(inputs), tuple(weights), num_kernels)


def total_flops(ops: Iterable[WorkOp]) -> float:
    return sum(op.flops for op in ops)
