"""Decode attention straight from the projection beyond the registry's cases: what it must not read
or write, what must not change a result, and which steps of the engine go through it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest
import torch
from engines import assert_exact, engine_for, prompts_of, tiny
from speculation import assert_drafted_exact, oracle_engine, steps_without_drafts
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.attention.decode_rows import DecodeRows
from ridgeline.engine.attention.paged import PagedSequences
from ridgeline.engine.execution.graph_kinds import GraphLimits, graph_kind
from ridgeline.engine.execution.rehearsal import decode_plan, draft_plan
from ridgeline.engine.execution.step_pass import PassKind
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepShape, shape_of
from ridgeline.engine.steps.flat_plan import DraftSlots, flattened, of_own_sequences
from ridgeline.engine.steps.notes import noting
from ridgeline.kernels import projected_attention as public
from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import NO_PAGE, sequences_of
from ridgeline.kernels.decode_attention.op import TINY
from ridgeline.kernels.launch import recording
from ridgeline.kernels.projected_attention import (
    Apart,
    Projected,
    in_one_kernel,
    launched,
    projected_attention,
    traced,
)
from ridgeline.kernels.projected_attention import op as registered
from ridgeline.kernels.projected_attention.triton import Fused, configs
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
H200 = TARGETS["sm_90"]
SETTING = registered.ProjectedCase(
    replace(TINY, dtype=torch.float32, lengths=(129, 17, 70), split_tokens=128), normed=True
)


def made(setting: registered.ProjectedCase = SETTING, **attention: Any) -> dict[str, Any]:
    setting = replace(setting, attention=replace(setting.attention, **attention))
    return registered.make(setting, CPU, torch.Generator().manual_seed(0))


def test_a_sequence_is_the_same_bits_in_any_batch() -> None:
    inputs = made()
    together = launched(**inputs)
    fresh = made()
    qkv, (cos, sin), slots, norm = fresh["rows"]
    own = Projected(qkv[1:2], (cos[1:2], sin[1:2]), slots[1:2], norm)
    tables = sequences_of(fresh["tables"], slice(1, 2))
    alone = launched(**fresh | {"rows": own, "tables": tables})
    assert torch.equal(alone, together[1:2])


def test_pages_behind_the_window_are_not_read() -> None:
    expected = launched(**made(window=20))
    inputs = made(window=20)
    inputs["tables"].page_table[0, : (129 - 20) // 16] = NO_PAGE
    assert torch.equal(launched(**inputs), expected)


def test_a_row_without_a_slot_writes_nothing() -> None:
    """Padding, of no length; and steps that belong to nobody, of one token."""
    inputs = made(lengths=(0, 1, 40), split_tokens=None)
    inputs["rows"].slots.fill_(-1)
    before = [pages.clone() for pages in inputs["pages"].tensors()]
    out = registered.fused(**inputs)
    assert out.isfinite().all()
    assert out[0].abs().max() == 0
    for after, pages in zip(inputs["pages"].tensors(), before, strict=True):
        assert torch.equal(after.nan_to_num(7.0), pages.nan_to_num(7.0))


def kernels_of(config: Any = None, **attention: Any) -> list[str]:
    inputs = made(**attention, split_tokens=None)
    with recording(H200) as calls:
        launched(**inputs | {"run": DecodeRun(config=config)})
    return [call.kernel.__name__ for call in calls]


def test_values_take_one_kernel_and_codes_two() -> None:
    one, two = ["projected_attention_kernel"], ["rotary_pages_kernel", "decode_attention_kernel"]
    assert kernels_of(lengths=(3000, 17)) == one
    assert kernels_of(dtype=torch.bfloat16) == one
    assert kernels_of(cache=torch.int8) == two
    assert kernels_of(Apart()) == two
    assert kernels_of(Fused(64, 4, 2, 64), cache=torch.int8) == one


def as_kept(way: Any) -> dict[str, Any]:
    """A choice as it comes back from the file of choices."""
    kept: dict[str, Any] = json.loads(json.dumps(asdict(way)))
    return kept


def test_what_was_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels for values, one for codes, in splits as short as was measured to be best."""
    inputs = made(split_tokens=None)
    given = (inputs["rows"].qkv, inputs["pages"], inputs["tables"])
    assert in_one_kernel(*given)
    monkeypatch.setattr(public, "chosen", lambda *_: as_kept(Apart()))
    assert not in_one_kernel(*given)
    assert len(kernels_of()) == 2
    monkeypatch.setattr(public, "chosen", lambda *_: as_kept(Fused(64, 8, 3, 64)))
    with recording(H200) as calls:
        launched(**made(cache=torch.int8, split_tokens=None))
    (call,) = calls
    assert (call.constants["BLOCK"], call.num_warps, call.num_stages) == (64, 8, 3)
    assert call.args[-2:] == (64, 3)  # tokens a split, splits
    assert public.choose_config(*given, 128) is None  # fixed splits: the same for any batch


def test_ways_fill_a_chip_that_one_sequence_leaves_empty() -> None:
    splits = [way.split for way in configs(8, 1024, 128, torch.bfloat16, H200)]
    assert {None, 128, 64} == set(splits)
    assert {way.split for way in configs(512, 1024, 128, torch.bfloat16, H200)} == {None}
    inputs = made(lengths=(129, 5), split_tokens=None)
    search = registered.search(**inputs)
    assert Apart() in search.configs
    expected = launched(**inputs)
    for way in (min(search.configs[:-1], key=lambda way: way.split or 4096), Apart()):
        fresh = made(lengths=(129, 5), split_tokens=None)
        found = launched(**fresh | {"run": DecodeRun(config=way)})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_traces_and_holds_to_its_schema() -> None:
    inputs = made(cache=torch.int8, split_tokens=None)
    expected = projected_attention(**made(cache=torch.int8, split_tokens=None))
    compiled = torch.compile(projected_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs), expected)
    plain = made()
    pages = [x.nan_to_num(0.0) for x in plain["pages"].tensors()]
    tables = plain["tables"]
    rows = plain["rows"]
    arguments = [rows.qkv, *rows.angles, rows.slots, *pages, None, None]
    arguments += [tables.page_table, tables.lengths, None, None, 0.125, None, None]
    arguments += [None, None, 1e-6, 0.0, None]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(traced, tuple(arguments), test_utils=checks)


def test_what_is_refused_says_why() -> None:
    codes = made(cache=torch.int8)
    with pytest.raises(ValueError, match="need scales"):
        registered.fused(**codes | {"pages": codes["pages"]._replace(v_scale=None)})
    with pytest.raises(ValueError, match="not a multiple of 64"):
        registered.fused(**made() | {"run": DecodeRun(100)})


# The engine. Its GPU path on a CPU: references instead of kernels, and otherwise the same.


class Watched(DecodeRows):
    """Counts layers, and sees that no sequence has two rows."""

    seen: ClassVar[list[int]] = []

    def attend_projected(self, *about: Any) -> Tensor:
        seats = self.inputs.seats[self.inputs.totals > 0].tolist()
        assert len(set(seats)) == len(seats), f"seats {seats}"
        self.seen.append(len(seats))
        return super().attend_projected(*about)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("ridgeline.engine.execution.forward.DecodeRows", Watched)
    monkeypatch.setattr(Watched, "seen", [])
    return Watched.seen


def like_gpu(engine: Engine) -> Engine:
    engine.runner.passes.sequences = PagedSequences
    return engine


@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding", "phi3-longrope-partial"])
def test_decode_steps_go_through_it_and_are_exact(name: str, watched: list[int]) -> None:
    engine = like_gpu(engine_for(tiny(name), budget=24))
    assert_exact(engine, prompts_of([1, 16, 20]), [Sampling(max_tokens=6)] * 3)
    assert watched.count(3) >= engine.model.config.num_layers  # rows of all three together


def test_drafts_of_a_stream_do_not(watched: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """A step that fails with its drafts is run again without them: the log would say so."""
    engine = like_gpu(oracle_engine(tiny("llama-mha")))
    assert_drafted_exact(engine, prompts_of([5, 33]), [Sampling(max_tokens=9)] * 2)
    assert engine.stats.drafted_tokens > 0
    assert steps_without_drafts(caplog) == []
    shared = flattened(draft_plan(3), DraftSlots(8, 4), one_token_rows=True)
    assert not of_own_sequences(shared)
    assert of_own_sequences(decode_plan(4))
    assert of_own_sequences(StepPlan(0))


def test_a_graph_with_drafts_is_another(watched: list[int]) -> None:
    """Of as many rows: what was captured for rows of their own must not serve drafts."""
    shared = flattened(draft_plan(11), DraftSlots(12, 11), one_token_rows=True)
    limits = GraphLimits(64, 4096, 64)
    keys = [graph_kind(plan, limits, 10) for plan in (decode_plan(12), shared)]
    own, other = keys
    assert own is not None
    assert other is not None
    assert own.shape == other.shape
    assert own.own_sequences
    assert not other.own_sequences
    engine = like_gpu(engine_for(tiny("llama-mha")))
    passes = engine.runner.passes
    assert passes.sequences_for(own) is Watched
    assert passes.sequences_for(other) is PagedSequences
    assert passes.sequences_for(PassKind(StepShape(9, 4, 1, 5), 10)) is PagedSequences
    deterministic = engine_for(tiny("llama-mha"), deterministic=True).runner.passes
    assert deterministic.sequences_for(own) is deterministic.sequences


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_notes_say_what_is_launched(kv_dtype: str) -> None:
    engine = like_gpu(engine_for(tiny("qwen3"), kv_dtype=kv_dtype, kernels="reference"))
    plan = decode_plan(2)
    with noting(engine.model) as notes, torch.inference_mode():
        inputs = engine.runner.sender.send(plan, shape_of(plan))
        engine.runner.forward(inputs, PassKind(shape_of(plan), 1), notes)
    names = [note.op for note in notes]
    own = [name for name in names if not name.endswith("_norm")]
    between = own[own.index("layers.0.attn.qkv") + 1 : own.index("layers.0.attn.out")]
    apart = ["rotary_pages", "decode_attention"]
    assert between == (apart if kv_dtype == "int8" else ["projected_attention"])
