"""Steps of layouts with hundreds of ranks, in one process: every collective, by its formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import whole_model

from ridgeline.models import ModelConfig
from ridgeline.models.cost import layer_matrices, num_parameters
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.recording import Collective, CollectiveRecorder
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.memory.plan import itemise
from ridgeline.training.ranks import at_scale
from ridgeline.training.ranks.at_scale import StepAtScale
from ridgeline.training.ranks.context import context_cut
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors

LENGTH = 64
EXPERTS = "layers.0.mlp.gate_up"


def step_of(model: ModelConfig, words: str, length: int = LENGTH, rank: int = 0) -> StepAtScale:
    return at_scale.step_at_scale(model, config_of(Layout.parse(words), length), rank)


def config_of(layout: Layout, length: int) -> TrainConfig:
    return TrainConfig(
        precision="bf16",
        recomputation="elementwise",
        layout=layout,
        batch=BatchOptions(sequences=layout.size_of("data"), micro=1),
        data=DataOptions(path="-", sequence_length=length),
    )


def by_kind(step: StepAtScale) -> dict[tuple[str, str], Collective]:
    return {(each.kind, each.over): each for each in step.collectives}


def tiny(**changes: object) -> ModelConfig:
    return describe_hf(TINY | {"vocab_size": 4096} | changes, origin="tiny").config


@pytest.mark.slow
def test_weights_are_gathered_twice_and_gradients_shared_out_once() -> None:
    model = tiny()
    step = step_of(model, "shard=512")
    found = by_kind(step)
    count = num_parameters(model)
    layers = count - model.hidden_size * (model.vocab_size + 1)
    gathered, reduced = found["all-gather", "shard"], found["reduce-scatter", "shard"]
    assert {each.num_ranks for each in step.collectives} == {512}
    assert gathered.count == 2 * model.num_layers + 1
    assert reduced.count == model.num_layers + 1
    # a row of 512 is filled up to all ranks
    assert gathered.num_bytes >= 2 * (count + layers)
    assert reduced.num_bytes >= 4 * count
    assert set(found) == {
        ("all-gather", "shard"), ("reduce-scatter", "shard"), ("all-reduce", "shard")
    }  # fmt: skip


@pytest.mark.slow
def test_more_ranks_than_experts_share_them_all() -> None:
    """A later dim is cut: no rank holds a whole expert, and none holds nothing."""
    model = tiny(
        architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    parts = [Holdings(model, Layout(shard=8)).of(EXPERTS, (4, 128, 64), r) for r in range(8)]
    assert {part.local_shape for part in parts if part is not None} == {(4, 16, 64)}
    shares = [step_of(model, "shard=8", rank=rank) for rank in (0, 7)]
    whole = num_parameters(model)
    for share in shares:
        assert share.num_parameters == pytest.approx(whole / 8, rel=0.01)
    assert by_kind(shares[0])["reduce-scatter", "shard"].num_bytes == pytest.approx(
        4 * whole, rel=0.01
    )


def test_copies_are_summed_once_a_step_and_never_gathered() -> None:
    model = tiny()
    config = config_of(Layout.parse("replicate=8"), LENGTH)
    several = replace(config, batch=BatchOptions(sequences=4 * 8, micro=1))
    for train in (config, several):
        found = at_scale.step_at_scale(model, train).collectives
        sums = {each.key: each for each in found}["all-reduce", "replicate", 8]
        assert sums.count == model.num_layers + 1 + 1  # blocks, what is outside of them, the norm
        assert sums.num_bytes == pytest.approx(4 * num_parameters(model), abs=100)
        assert len(found) == 1


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_matrices_cut_over_ranks_sum_the_stream(sequence: str) -> None:
    model = tiny(num_attention_heads=4, num_key_value_heads=4)
    found = by_kind(step_of(model, f"tensor=4,sequence={sequence}"))
    stream = 2 * LENGTH * model.hidden_size
    layers = 2 * model.num_layers  # attention and MLP
    if sequence == "true":
        # forward: into attention, the MLP and the head; backward: into what came out, and the
        # embedding. Beside them each row's two numbers of the loss.
        losses = 4 * 4 * 2 * LENGTH
        assert found["all-gather", "tensor"].num_bytes == (2 * layers + 2) * stream + losses
        assert found["reduce-scatter", "tensor"].num_bytes == (2 * layers + 2) * stream
    else:
        # sums: of what comes out, forward; of what went in, backward; embedding and head
        assert found["all-reduce", "tensor"].num_bytes == pytest.approx(
            (2 * layers + 2) * stream, rel=0.02
        )


@pytest.mark.slow
def test_every_rank_of_a_layout_has_its_share() -> None:
    model = tiny(num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    shares = [step_of(model, "replicate=2,shard=2,tensor=2", rank=rank) for rank in range(8)]
    norms = model.hidden_size * (2 * model.num_layers + 1)
    assert sum(each.num_parameters for each in shares) == 2 * (num_parameters(model) + norms)


def test_layers_of_a_kind_are_counted_without_being_run() -> None:
    """As if each had been."""
    model = tiny(num_hidden_layers=5)
    counted = step_of(model, "shard=4,tensor=2")
    layout = Layout.parse("shard=4,tensor=2")
    run = at_scale._recorded(model, config_of(layout, LENGTH), 0, num_passes=1)
    assert counted == run


def recorded(mesh: Mesh, model: ModelConfig, train: TrainConfig) -> tuple[Collective, ...]:
    """What ranks over gloo do, as it is recorded here."""
    trainer = rank_trainer(model, train, mesh, whole_tensors(whole_model(model)))
    cut = context_cut(model, mesh.layout, mesh.rank, LENGTH)
    batches = [at_scale.counted(cut(at_scale.empty_batch(train)))] * train.own_sequences
    trainer.run_passes(batches)  # the first time, pipelines get to know each other
    with CollectiveRecorder(mesh) as recorder:
        gradients = trainer.run_passes(batches)
        trainer.sharing.totals(torch.zeros(()), gradients)
    return tuple(recorder.totals())


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("pipeline=2", marks=pytest.mark.slow),
        pytest.param("pipeline=2,shard=2", marks=pytest.mark.slow),
        pytest.param("pipeline=2,schedule=interleaved,stages=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("pipeline=2,context=2", marks=pytest.mark.slow),
        pytest.param("shard=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_counts_are_those_of_ranks(words: str) -> None:
    """Of layers and micro-batches that are not run here, too: to the byte, on every rank."""
    model, layout = tiny(num_hidden_layers=5), Layout.parse(words)
    train = TrainConfig(
        precision="bf16",
        recomputation="elementwise",
        layout=layout,
        batch=BatchOptions(sequences=4 * layout.size_of("data"), micro=1),
        data=DataOptions(path="-", sequence_length=LENGTH),
    )
    for rank, ranks in enumerate(run_ranks(layout, recorded, model, train)):
        counted = at_scale.step_at_scale(model, train, rank).collectives
        assert {each.key: each for each in counted} == {each.key: each for each in ranks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ("llama-3.1-70b", "shard=64,tensor=8"),
        ("llama-3.1-405b", "replicate=16,shard=128,tensor=8"),
        ("qwen3-235b-a22b", "shard=512"),
    ],
)
def test_large_models_on_thousands_of_ranks(shape: str, layout: str) -> None:
    model = describe_shape(shape).config
    step = step_of(model, layout, length=4096)
    found = by_kind(step)
    ranks = Layout.parse(layout)
    whole = num_parameters(model)
    assert step.num_parameters == pytest.approx(whole / (ranks.shard * ranks.tensor), rel=0.01)
    assert step.state_bytes == pytest.approx(6 * step.num_parameters, rel=0.01)  # 16 bits, 2 means
    layers = sum(layer_matrices(model, each) for each in model.layers)
    assert found["all-gather", "shard"].num_bytes == pytest.approx(
        2 * (whole + layers) / ranks.tensor, rel=0.01
    )
    assert found["reduce-scatter", "shard"].num_bytes == pytest.approx(
        4 * whole / ranks.tensor, rel=0.01
    )


@pytest.mark.parametrize("words", ["shard=3,tensor=2", "replicate=2,shard=2", "tensor=4"])
def test_the_memory_plan_counts_what_a_rank_keeps(words: str) -> None:
    """Weights and state to the byte."""
    model = tiny(num_attention_heads=4, num_key_value_heads=2)
    config = config_of(Layout.parse(words), LENGTH)
    step = at_scale.step_at_scale(model, config)
    plan = itemise(model, config, "cpu", 1 << 40)
    planned = {item.name: item.num_bytes for item in plan.items}
    assert planned["weights"] == step.weight_bytes
    assert planned["remainders"] + planned["moments"] == step.state_bytes
    assert ("gathered weights" in planned) == (words != "tensor=4")
