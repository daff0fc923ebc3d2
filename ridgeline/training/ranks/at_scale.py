"""One rank's step under a layout of any size, in this process and without its machines: torch's
"fake" groups answer at once, and its fake tensors have shapes and no memory. What comes out is
every collective with its size and group, and what the rank's weights and state take.

    step = step_at_scale(model_config, train_config)        # of rank 0, in seconds
    step.collectives, step.weight_bytes

No other process group may be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.mesh import Mesh, join_mesh, leave_mesh
from ridgeline.parallel.recording import Collective, CollectiveRecorder
from ridgeline.training.config import TrainConfig
from ridgeline.training.ranks.context import context_cut
from ridgeline.training.ranks.pipelines.stage_passes import StagePasses, sent_between_stages
from ridgeline.training.ranks.rank_trainer import rank_trainer
from ridgeline.training.ranks.weights.fully_sharded import needs_sharding, weights_mesh
from ridgeline.training.stepping.experts import DropCounts, ExpertCut
from ridgeline.training.stepping.ops import PLAIN
from ridgeline.training.stepping.step import StepMode


@dataclass(frozen=True)
class StepAtScale:
    collectives: tuple[Collective, ...]
    num_parameters: int  # of this rank
    weight_bytes: int
    state_bytes: int  # what the optimizer keeps beside them

    def less(self, other: StepAtScale) -> StepAtScale:
        return self.more(other, -1)

    def more(self, other: StepAtScale, times: int) -> StepAtScale:
        numbers = {
            name: getattr(self, name) + times * getattr(other, name)
            for name in ("num_parameters", "weight_bytes", "state_bytes")
        }
        return StepAtScale(summed(self.collectives, other.collectives, times), **numbers)


def summed(
    some: Sequence[Collective], others: Sequence[Collective], times: int
) -> tuple[Collective, ...]:
    totals = {each.key: each for each in some}
    for each in others:
        before = totals.get(each.key) or replace(each, count=0, num_bytes=0)
        totals[each.key] = replace(
            before,
            count=before.count + times * each.count,
            num_bytes=before.num_bytes + times * each.num_bytes,
        )
    kept = [each for each in totals.values() if each.count or each.num_bytes]
    return tuple(sorted(kept, key=lambda each: -each.sent_bytes))


def step_at_scale(model: ModelConfig, train: TrainConfig, rank: int = 0) -> StepAtScale:
    """The passes of a step and the sums of its gradients. Nothing is open in the config. Tokens
    choose all experts equally often.

    Layers of a kind are alike: a step of few of them is run, and what one more adds stands for the
    others, exactly; so it is with the micro-batches of a pipeline. Windows and ropes change no
    collective.
    """
    layers = [replace(each, rope=None, window=None) for each in own_layers(model, train, rank)]
    kinds, first = Counter(layers), layers[0]
    least = total = _counted(model, train, rank, first)
    kinds[first] -= train.layout.stages  # one of the first kind is there for each stage
    for kind, count in kinds.items():
        if count:
            added = _counted(model, train, rank, first, kind).less(least)
            total = total.more(added, count)
    return total


def own_layers(model: ModelConfig, train: TrainConfig, rank: int) -> list[LayerConfig]:
    """Of a rank's stages."""
    stages = Holdings(model, train.layout).stages
    return [model.layers[i] for stage in train.layout.stages_of(rank) for i in stages[stage]]


def _counted(
    model: ModelConfig, train: TrainConfig, rank: int, first: LayerConfig, *more: LayerConfig
) -> StepAtScale:
    """Of a model whose stages have one layer each, and the rank's first one these besides."""
    num_passes = train.own_sequences // micro_of(train)
    if train.layout.pipeline == 1:
        return _recorded(replace(model, layers=(first, *more)), train, rank, num_passes)
    own = train.layout.stages_of(rank)[0]
    layers: list[LayerConfig] = []
    stages = []
    for stage in range(train.layout.num_stages):
        begin = len(layers)
        layers += [first, *more] if stage == own else [first]
        stages.append(range(begin, len(layers)))
    small = replace(model, layers=tuple(layers))
    one, two = (_recorded(small, train, rank, count, tuple(stages)) for count in (1, 2))
    return one.more(two.less(one), num_passes - 1)


def _recorded(
    model: ModelConfig,
    train: TrainConfig,
    rank: int,
    num_passes: int,
    stages: tuple[range, ...] | None = None,
) -> StepAtScale:
    layout = train.layout
    assert not distributed.is_initialized(), "a group of another run"
    cpu = torch.device("cpu")
    mesh = join_mesh(layout, FakeStore(), rank, layout.size, cpu, backend="fake")
    try:
        if needs_sharding(mesh):
            weights_mesh(mesh)  # of real tensors
        cut = context_cut(model, layout, rank, train.data.sequence_length)
        batches = [counted(cut(empty_batch(train))) for _ in range(num_passes)]
        holdings = Holdings(model, layout, stages)
        with FakeTensorMode(allow_non_fake_inputs=True):
            trainer = rank_trainer(model, train, mesh, (), PLAIN, holdings)
            trainer.mode = with_even_experts(trainer.mode, model, mesh)
            between: list[Collective] = []
            if trainer.pipeline is not None:
                own = trainer.local.stages
                trainer.pipeline = StagePasses(own, mesh)
                between = sent_between_stages(own, mesh, batches, trainer.mode.forward)
            with CollectiveRecorder(mesh) as recorder:
                gradients = trainer.run_passes(batches)
                trainer.sharing.totals(torch.zeros(()), gradients)
            local = trainer.weights.local.values()
            return StepAtScale(
                summed(recorder.totals(), between, 1),
                sum(each.numel() for each in local),
                sum(each.nbytes for each in local),
                sum(each.nbytes for _, each in trainer.weights.tensors()),
            )
    finally:
        leave_mesh()


def with_even_experts(mode: StepMode, model: ModelConfig, mesh: Mesh) -> StepMode:
    """Which expert a token chooses is nothing that a tensor without values could say."""
    if all(layer.experts is None for layer in model.layers):
        return mode
    even = ExpertCut(mesh.axis("expert"), mesh.layout.capacity or 1.0, DropCounts(mesh.device))
    return replace(mode, forward=replace(mode.forward, experts=even))


def micro_of(train: TrainConfig) -> int:
    assert train.batch.micro is not None, "nothing is open"
    return train.batch.micro


def empty_batch(train: TrainConfig) -> PackedBatch:
    """Of one pass: each sequence a document, all of it learned."""
    length, count = train.data.sequence_length, micro_of(train)
    ids = torch.zeros(length * count, dtype=torch.int64)
    starts = torch.arange(0, length * count + 1, length, dtype=torch.int32)
    return PackedBatch.of(ids, ids, torch.arange(length).repeat(count), starts)


def counted(batch: PackedBatch) -> PackedBatch:
    """What is counted of it is counted here, where tensors have values."""
    for name in ("num_targets", "lengths", "longest", "learned"):
        getattr(batch, name)
    return batch
