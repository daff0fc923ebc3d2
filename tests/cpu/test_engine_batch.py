"""Plans as tensors, the GPU's path by its references, and steps padded up to a graph's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engines import assert_exact, engine_for, prompts_of, tiny
from tiny_models import MODELS
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.attention.paged import PagedSequences
from ridgeline.engine.execution.graph_kinds import (
    FEW_PROMPTS,
    MANY_PROMPTS,
    GraphLimits,
    graph_kind,
    is_mixed,
)
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.step_pass import PassKind, SamplingKind, StepPass
from ridgeline.engine.loading.deterministic import deterministic
from ridgeline.engine.memory.footprint import driver_bytes
from ridgeline.engine.sampling.sampling import _argmax
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import (
    ON_HOST,
    SeatTable,
    StepInputs,
    StepShape,
    num_words,
    sections,
    shape_of,
    table_changes,
    views,
    write,
)
from ridgeline.engine.steps.flat_plan import of_fresh_prompts
from ridgeline.engine.steps.notes import noting

PLAN = StepPlan(
    step_id=3,
    num_decode_rows=2,
    keys=[("a", 0), ("b", 0), ("c", 0)],
    seats=[4, 1, 0],
    first_positions=[9, 30, 2],
    num_tokens=[1, 1, 3],
    token_ids=[0, 7, 11, 12, 13],
    positions=[9, 30, 2, 3, 4],
    slots=[25, 62, 130, 131, -1],
    device_tokens=[0],
    device_samples=[5],
    sample_keys=[("a", 0), ("b", 0), ("c", 0)],
    sample_seats=[4, 1, 0],
    sample_drafts=[0, 0, 0],
    logit_tokens=[0, 1, 4],
    table_seats=[4, 0],
    table_indexes=[2, 1],
    table_pages=[17, 18],
)


def seat_table() -> SeatTable:
    seats = SeatTable(max_batch=6)
    seats.sit(4, 8, Sampling(temperature=0.5, top_k=3), seed=2**64 - 2)
    seats.sit(1, 40, Sampling(top_p=0.25, min_p=0.125, temperature=2.0), seed=7)
    seats.sit(0, 5, Sampling(), seed=1)
    return seats


def written(shape: StepShape) -> StepInputs:
    words = torch.full((num_words(shape),), -99, dtype=torch.int32)
    write(words.numpy(), PLAN, shape, seat_table())
    return views(words, shape)


@pytest.mark.smoke
def test_a_plans_numbers() -> None:
    inputs = written(shape_of(PLAN))
    assert inputs.ids.tolist() == PLAN.token_ids
    assert inputs.sources.tolist() == [5, ON_HOST, ON_HOST, ON_HOST, ON_HOST]
    assert inputs.positions.tolist() == PLAN.positions
    assert inputs.lengths.tolist() == [10, 40, 5, 5, 5]  # the prompt's, or the token's own
    assert inputs.slots.tolist() == PLAN.slots
    assert inputs.seats.tolist() == [4, 1, 0]
    assert inputs.totals.tolist() == [10, 31, 5]
    assert inputs.order.tolist() == [1, 0]  # of the decode rows, the longest first
    assert inputs.starts.tolist() == [0, 3]
    assert inputs.logit_tokens.tolist() == [0, 1, 4]
    assert inputs.draw_positions.tolist() == [10, 31, 5]
    assert inputs.temperature.tolist() == [0.5, 2.0, 0.0]
    assert inputs.top_k.tolist() == [3, 0, 0]
    assert inputs.top_p.tolist() == [1.0, 0.25, 1.0]
    assert inputs.min_p.tolist() == [0.0, 0.125, 0.0]
    assert inputs.seeds.tolist() == [-2, 7, 1]  # the first as its two's complement
    assert table_changes(PLAN, 10).tolist() == [[42, 1], [17, 18]]


@pytest.mark.smoke
def test_padding_does_no_harm() -> None:
    inputs = written(StepShape(9, 2, 4, 6))
    assert inputs.slots.tolist() == [*PLAN.slots, -1, -1, -1, -1]
    assert inputs.sources.tolist()[5:] == [ON_HOST] * 4
    assert inputs.seats.tolist() == [4, 1, 0, 6, 6, 6]
    assert inputs.totals.tolist() == [10, 31, 5, 0, 0, 4]  # the last one holds the tokens
    assert inputs.starts.tolist() == [0, 3, 3, 3, 7]
    assert inputs.logit_tokens.tolist() == [0, 1, 4, 0, 0, 0]
    assert inputs.temperature.tolist()[3:] == [0.0] * 3


@pytest.mark.smoke
def test_decode_rows_are_filled_up_before_the_prompts() -> None:
    inputs = written(StepShape(12, 5, 3, 6))
    assert inputs.slots.tolist() == [25, 62, -1, -1, -1, 130, 131, -1, -1, -1, -1, -1]
    assert inputs.ids.tolist() == [0, 7, 0, 0, 0, 11, 12, 13, 0, 0, 0, 0]
    assert inputs.sources.tolist() == [5, *[ON_HOST] * 11]
    assert inputs.positions.tolist()[5:8] == [2, 3, 4]
    assert inputs.lengths.tolist() == [10, 40, 1, 1, 1, 5, 5, 5, 1, 1, 1, 1]
    assert inputs.seats.tolist() == [4, 1, 6, 6, 6, 0, 6, 6]
    assert inputs.totals.tolist() == [10, 31, 0, 0, 0, 5, 0, 4]
    assert inputs.order.tolist() == [1, 0, 2, 3, 4]
    assert inputs.starts.tolist() == [0, 3, 3, 7]
    assert inputs.logit_tokens.tolist() == [0, 1, 7, 0, 0, 0]
    assert inputs.draw_positions.tolist()[:3] == [10, 31, 5]


@pytest.mark.smoke
def test_sections_do_not_overlap_and_are_aligned() -> None:
    for shape in (shape_of(PLAN), StepShape(1, 1, 0, 1), StepShape(513, 0, 8, 8)):
        ends = 0
        for section in sections(shape).values():
            assert section.start >= ends
            assert section.start % 4 == 0
            ends = section.stop


class PaddedSteps(Graphs):
    """Graphs that are run instead of captured: everything else is as on a GPU."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        super().__init__(engine.runner, max_tokens, engine.max_context, budget_bytes=1)
        self.keys: list[PassKind] = []
        self.choices: set[SamplingKind] = set()

    def replay(
        self, key: PassKind, inputs: StepInputs, choice: SamplingKind
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.choices.add(choice)
        logits_RV = self.compute(key, inputs)
        tokens_R = self.work.choose(logits_RV, inputs, choice)
        return logits_RV, tokens_R


@pytest.mark.sweep(keep=10)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_gpus_path_is_exact(name: str) -> None:
    """The kernels' references in place of the kernels, with steps padded as graphs need it."""
    engine = engine_for(tiny(name))
    engine.runner.passes.sequences, engine.runner.passes.starts_at_once = PagedSequences, True
    engine.runner.graphs = graphs = PaddedSteps(engine, max_tokens=48)
    longest = min(40, engine.max_context - 9)
    prompts = prompts_of([3, min(20, longest), longest])
    samplings = [
        Sampling(max_tokens=8),
        Sampling(max_tokens=7, temperature=0.8, seed=4, frequency_penalty=0.5),
        Sampling(max_tokens=6, temperature=1.0, top_p=0.8, seed=9, n=2),
    ]
    assert_exact(engine, prompts, samplings)
    assert {key.shape.num_decode_rows for key in graphs.keys} >= {4}
    for prompt, sampling in zip(prompts, samplings, strict=True):  # alone: graphs of prompts
        assert_exact(engine_with(engine, graphs), [[*prompt[1:], 5]], [sampling])
    assert any(key.shape.num_prompt_rows for key in graphs.keys)
    assert {choice.keeps for choice in graphs.choices} == {True, False}


@pytest.mark.sweep(keep=10)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_prompts_beside_a_full_batch_are_exact(
    name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens a step: prompts come in pieces, beside those that run already. Half is full."""
    monkeypatch.setattr("ridgeline.engine.execution.graph_kinds.FULL", 0.5)
    engine = engine_for(tiny(name), budget=24, max_batch=4, overlap=overlap)
    engine.runner.passes.sequences, engine.runner.passes.starts_at_once = PagedSequences, True
    engine.runner.graphs = graphs = PaddedSteps(engine, max_tokens=40)
    longest = min(40, engine.max_context - 9)
    prompts = prompts_of([3, 7, min(30, longest), longest, 5, 11])
    samplings = [
        Sampling(max_tokens=9),
        Sampling(max_tokens=7, temperature=0.8, seed=4, frequency_penalty=0.5),
        Sampling(max_tokens=6, temperature=1.0, top_p=0.8, seed=9, n=2),
        *[Sampling(max_tokens=count) for count in (3, 8, 5)],
    ]
    for _ in range(2):  # a kind is replayed when it is met again
        assert_exact(engine, prompts, samplings)
        prompts = [[*prompt[1:], 5] for prompt in prompts]
    mixed = {kind for kind in graphs.keys if is_mixed(kind)}
    assert mixed
    assert graphs.met == mixed


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "granite"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_in_the_heads_dtype_lose_nothing(name: str, dtype: str) -> None:
    model = tiny(name, dtype)
    rows = torch.randn(7, model.config.hidden_size).to(model.head.weight.dtype)
    for kind in (model, deterministic(model)):
        out = torch.full((7, model.config.vocab_size), float("nan"), dtype=kind.logits_dtype)
        with torch.inference_mode():
            expected = kind.logits(rows)
            assert kind.logits(rows, out=out) is out
        assert torch.equal(out.float(), expected)
    assert (out.dtype == torch.bfloat16) == ((name, dtype) == ("llama-tied", "bf16"))


class FailingSteps(PaddedSteps):
    """Steps of more than two rows fail."""

    num_failed = 0

    def replay(
        self, key: PassKind, inputs: StepInputs, choice: SamplingKind
    ) -> tuple[Tensor, Tensor]:
        if key.shape.num_decode_rows > 2 and (inputs.sources >= 0).all():
            self.num_failed += 1
            raise RuntimeError("on purpose")
        return super().replay(key, inputs, choice)


def test_parts_of_a_step_take_the_last_steps_tokens() -> None:
    """All of its parts, though each samples: their tokens wait until the last one has run."""
    engine = engine_for(tiny("llama-mha"), overlap=True)
    engine.runner.passes.sequences = PagedSequences
    engine.runner.graphs = graphs = FailingSteps(engine, max_tokens=48)
    assert_exact(engine, prompts_of([5, 9, 14, 20]), [Sampling(max_tokens=9)] * 4)
    assert graphs.num_failed > 0


class Counted(PaddedSteps):
    """Graphs that are run instead of captured, and take memory all the same."""

    reserved = 0

    def replay(self, key: PassKind, inputs: StepInputs, filtered: bool) -> tuple[Tensor, Tensor]:
        if key not in self.captured:
            return self._run_and_capture(key, inputs, filtered)
        return super().replay(key, inputs, filtered)

    def _capture(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        self.reserved += 2 << 20
        return None, work()


def test_graphs_are_captured_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes two captures' memory, and what the driver keeps."""
    prompts, samplings = prompts_of([9, 20, 4]), [Sampling(max_tokens=n) for n in (2, 5, 9)]
    engine = engine_for(tiny("llama-mha"))
    engine.runner.passes.sequences = PagedSequences
    taken = (4 << 20) + driver_bytes(engine.config)
    for room, most in ((1, 1), (taken, 1), (taken + 1, 2), (9 * taken, 4)):
        engine.runner.graphs = graphs = Counted(engine, max_tokens=48)
        graphs.budget_bytes = room
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, own=graphs: own.reserved)
        assert_exact(engine, prompts, samplings)
        assert len(graphs.captured) == most
        assert graphs.used_bytes == most * taken


def engine_with(engine: Engine, graphs: Graphs) -> Engine:
    engine.runner.graphs = graphs
    return engine


def plan_of(num_decode: int, prompts: list[int]) -> StepPlan:
    rows = [1] * num_decode + prompts
    keys = [(row, 0) for row in range(len(rows))]
    return StepPlan(
        1,
        num_decode_rows=num_decode,
        keys=keys,
        seats=list(range(len(rows))),
        num_tokens=rows,
        token_ids=[0] * sum(rows),
        sample_seats=list(range(len(rows))),
        sample_keys=keys,
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("plan", "max_length", "expected"),
    [
        (plan_of(1, []), 100, PassKind(StepShape(1, 1, 0, 1), 1024)),
        (plan_of(9, []), 1025, PassKind(StepShape(12, 12, 0, 12), 4096)),
        (plan_of(65, []), 20_000, PassKind(StepShape(80, 80, 0, 80), 30_000)),
        (plan_of(81, []), 100, None),  # more than the largest
        (plan_of(0, [40]), 1, PassKind(StepShape(64, 0, FEW_PROMPTS, FEW_PROMPTS), 30_000)),
        (plan_of(0, [40, 41]), 1, None),
        (plan_of(0, [5] * FEW_PROMPTS), 1, None),  # no row is left for the padding
    ],
)
def test_which_graph_serves_a_step(
    plan: StepPlan, max_length: int, expected: PassKind | None
) -> None:
    assert graph_kind(plan, GraphLimits(80, 30_000, 80), max_length) == expected


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("plan", "max_length", "expected"),
    [
        (plan_of(19, [20]), 100, PassKind(StepShape(64, 20, FEW_PROMPTS, 20), 4096)),
        (plan_of(18, [5, 4]), 5000, PassKind(StepShape(32, 20, FEW_PROMPTS, 20), 16384)),
        (plan_of(18, [50]), 20_000, PassKind(StepShape(80, 20, FEW_PROMPTS, 20), 30_000)),
        (plan_of(17, [20]), 100, None),  # more could decode
        (plan_of(18, [61]), 100, None),  # with two rows more, 81 tokens
        (plan_of(21, [20]), 100, None),  # rows of drafts
        (plan_of(19, [2, 2]), 100, None),  # a sample more than there are streams
    ],
)
def test_prompts_have_a_graph_beside_a_full_batch(
    plan: StepPlan, max_length: int, expected: PassKind | None
) -> None:
    assert graph_kind(plan, GraphLimits(80, 30_000, max_batch=20), max_length) == expected


@pytest.mark.smoke
def test_a_small_batch_is_full_without_the_row_of_the_prompt() -> None:
    limits = GraphLimits(80, 30_000, max_batch=6)
    expected = PassKind(StepShape(32, 6, FEW_PROMPTS, 6), 4096)
    assert graph_kind(plan_of(5, [20]), limits, 100) == expected
    assert graph_kind(plan_of(4, [20]), limits, 100) is None


@pytest.mark.smoke
def test_padding_longer_than_the_context_is_not_made() -> None:
    limits = GraphLimits(512, max_context=8, max_batch=8)
    for num_decode, prompts in ((0, 6), (8, 5)):
        assert graph_kind(plan_of(num_decode, [30] * prompts), limits, 1) is None


@pytest.mark.smoke
def test_larger_steps_hold_more_prompts() -> None:
    limits = GraphLimits(2048, 30_000, max_batch=512)
    kind = graph_kind(plan_of(490, [31] * 20), limits, 100)
    assert kind == PassKind(StepShape(1152, 512, MANY_PROMPTS, 512), 4096)
    assert graph_kind(plan_of(480, [31] * MANY_PROMPTS), limits, 100) is None
    assert graph_kind(plan_of(500, [1537]), limits, 100) is None


def test_notes_are_in_the_order_of_launch() -> None:
    engine = engine_for(tiny("qwen3"), kernels="reference")
    steps: list[StepPass] = []
    send = engine.runner.send
    engine.runner.send = lambda step, shape: steps.append(step) or send(step, shape)  # type: ignore[func-returns-value, method-assign]
    engine.generate([[5, 6, 7]], Sampling(max_tokens=1))
    with noting(engine.model) as notes, torch.inference_mode():
        kind = PassKind(shape_of(steps[0].plan), 3, own_sequences=False)
        inputs = send(steps[0], kind.shape)
        engine.runner.forward(inputs, kind, notes)
    names = [note.op for note in notes]
    first = names[: names.index("layers.1.attn.qkv")]
    assert first == [
        "embed",
        "layers.0.attn.qkv",
        "layers.0.attn_norm",
        "rotary_pages",
        "prefill_attention",
        "layers.0.attn.out",
        "layers.0.mlp.gate_up",
        "layers.0.mlp_norm",
        "layers.0.mlp.down",
    ]
    assert notes[1].shape == (3, 48)
    assert not engine.model.embed._forward_pre_hooks  # the hooks are gone
    engine.runner.passes.sequences, engine.runner.passes.starts_at_once = PagedSequences, True
    with noting(engine.model) as at_once, torch.inference_mode():
        engine.runner.forward(inputs, kind, at_once)
    assert [note.op for note in at_once] == ["step_start", *names[1:]]


@pytest.mark.parametrize("vocab_size", [5, 256, 700, 1024, 1500])
def test_argmax_by_groups_is_argmax(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(0, 9, (40, vocab_size), generator=generator).float()  # many ties
    logits[3, vocab_size // 2] = float("nan")
    logits[4] = float("-inf")
    expected = np.asarray([row.argmax() for row in logits])
    assert (_argmax(logits).numpy() == expected).all()


def test_fresh_prompts_of_one_length_are_known() -> None:
    fresh = StepPlan(0, first_positions=[0, 0], num_tokens=[64, 64])
    assert of_fresh_prompts(fresh)
    assert not of_fresh_prompts(fresh._replace(num_tokens=[64, 63]))
    assert not of_fresh_prompts(fresh._replace(first_positions=[0, 16]))
    assert not of_fresh_prompts(fresh._replace(num_decode_rows=1))
