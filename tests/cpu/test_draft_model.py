"""A draft model stays in step with the target: one that is the target is always right, whatever
happens to pages, and one that is not changes nothing but the speed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from engines import assert_exact, engine_for, prompts_of, tiny
from speculation import DRAWN, GREEDY, force_drafts, steps_without_drafts
from tiny_models import MODELS, save_model
from tiny_tokenizers import byte_level_metadata

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.engine.memory.plan import itemise
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.speculation.draft_model import DraftModel, DraftPages
from ridgeline.errors import ContextLengthError, UnsupportedError
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import Limits, Recipe, Speculation, with_auto

pytestmark = pytest.mark.usefixtures("every_step_kept_its_drafts")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints by name: the target's own, and others."""
    found = {}
    for name in ("llama-mha", "mistral-sliding", "qwen2", "llama-wide-heads", "llama-rope-dynamic"):
        folder = tmp_path_factory.mktemp(name)
        save_model(name, folder)
        found[name] = str(folder)
    assert MODELS["llama-wide-heads"][1]["vocab_size"] != 131
    return found


def drafting_engine(name: str, draft: str, **changes: Any) -> Engine:
    speculation = Speculation("draft", max_draft_tokens=4, draft_model=draft)
    engine = engine_for(tiny(name), speculation=speculation, **changes)
    force_drafts(engine, lambda key: 1 + crc32(repr(key).encode()) % 4)
    return engine


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("name", ["llama-mha", "mistral-sliding"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_target_itself_is_always_right(
    name: str, overlap: bool, folders: dict[str, str]
) -> None:
    """Prompts in chunks, shared and copied pages, several outputs, greedy and drawn."""
    engine = drafting_engine(name, folders[name], budget=24, overlap=overlap)
    (base,) = prompts_of([50])
    prompts = [[*base[:40], 7, 8], [*base[:40], 9], base[:12] + [3] * 9, base, [5]]
    samplings = [GREEDY, replace(DRAWN, n=3), replace(GREEDY, top_k=4), DRAWN, GREEDY]
    for _ in range(2):
        assert_exact(engine, prompts, samplings)
    stats = engine.stats
    assert stats.hit_tokens > 0
    if name == "llama-mha":
        assert stats.drafted_tokens == stats.accepted_tokens > 100
    else:  # where every layer has a window, what it has passed cannot be made up for
        assert stats.drafted_tokens > stats.accepted_tokens > 0.8 * stats.drafted_tokens


def test_it_is_right_after_preemption(folders: dict[str, str]) -> None:
    engine = drafting_engine("llama-mha", folders["llama-mha"], num_pages=8)
    assert_exact(engine, prompts_of([20, 25, 18, 30, 22]), [replace(GREEDY, max_tokens=40)] * 5)
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.drafted_tokens == stats.accepted_tokens > 100


def test_it_catches_up_in_pieces_after_a_rest(folders: dict[str, str]) -> None:
    """Drafts begin late, when more is missing than goes into a step."""
    engine = drafting_engine("llama-mha", folders["llama-mha"], budget=16)
    assert engine.local.loop.drafting is not None
    policy, calls = engine.local.loop.drafting.policy, [0]
    wanted = policy.wanted

    def late(num_rows: int) -> Any:
        calls[0] += 1
        return wanted(num_rows) if calls[0] > 20 and calls[0] % 5 else {}

    policy.wanted = late  # type: ignore[method-assign]
    assert_exact(engine, prompts_of([60, 33]), [replace(GREEDY, max_tokens=40)] * 2)
    stats = engine.stats
    assert stats.drafted_tokens == stats.accepted_tokens > 20


def test_another_model_changes_nothing(folders: dict[str, str]) -> None:
    engine = drafting_engine("llama-mha", folders["qwen2"], budget=40)
    prompts = prompts_of([1, 5, 16, 33, 60])
    assert_exact(engine, prompts, [GREEDY, DRAWN, GREEDY, replace(DRAWN, top_p=0.6), GREEDY])
    assert engine.stats.drafted_tokens > engine.stats.accepted_tokens


def test_a_draft_that_fails_is_done_without(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = drafting_engine("llama-mha", folders["llama-mha"])
    drafter = engine.runner.drafter
    assert isinstance(drafter, DraftModel)

    def broken(*_: Any) -> None:
        raise RuntimeError("no draft today")

    monkeypatch.setattr(drafter.runner, "forward", broken)
    assert_exact(engine, prompts_of([9, 20]), [GREEDY] * 2)
    assert engine.stats.accepted_tokens == 0
    assert steps_without_drafts(caplog)
    caplog.clear()


def test_it_is_planned_for(folders: dict[str, str]) -> None:
    plan = drafting_engine("llama-mha", folders["qwen2"]).memory_plan
    without = engine_for(tiny("llama-mha")).memory_plan
    assert plan.bytes_of("draft weights") > 0
    assert plan.page_bytes > without.page_bytes
    config = describe_shape("llama-3.1-8b").config
    on_gpu = with_auto(Recipe(), config, torch.bfloat16, "cuda:0")
    both = itemise(config, on_gpu, 139 << 30, describe_shape("llama-3.2-1b").config)
    alone = itemise(config, on_gpu, 139 << 30)
    assert 0 < both.bytes_of("draft graphs") < both.bytes_of("graphs")
    assert both.bytes_of("graphs") == alone.bytes_of("graphs")
    assert both.bytes_of("activations") == alone.bytes_of("activations")


def test_a_draft_with_another_vocabulary_is_refused(folders: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match=r"vocabulary of 257 and the model one of 131"):
        drafting_engine("llama-mha", folders["llama-wide-heads"])


def test_a_draft_that_writes_otherwise_is_refused(tmp_path: Path) -> None:
    """The same number of tokens, with other ids."""
    tokens = byte_level_metadata("smollm")["tokenizer.ggml.tokens"]
    for name, own in (("model", tokens), ("draft", tokens[:3] + tokens[:2:-1])):
        (tmp_path / name).mkdir()
        save_model("llama-mha", tmp_path / name)
        metadata = byte_level_metadata("smollm") | {"tokenizer.ggml.tokens": own}
        for file, content in Tokenizer.from_gguf(metadata).files().items():
            (tmp_path / name / file).write_bytes(content)
    draft = Speculation("draft", draft_model=str(tmp_path / "draft"))
    limits = Limits(max_batch=4, token_budget=32, memory_share=0.05)
    recipe = Recipe(dtype="fp32", speculation=draft, limits=limits)
    with pytest.raises(UnsupportedError, match="another vocabulary") as raised:
        Engine(tmp_path / "model", recipe, device="cpu", num_pages=20)
    assert "\n" not in str(raised.value)


def test_the_context_is_what_both_reach(folders: dict[str, str]) -> None:
    draft = folders["llama-rope-dynamic"]  # 16 tokens times 2
    engine = drafting_engine("llama-mha", draft)
    reach = tiny("llama-rope-dynamic").config.max_context
    assert engine.max_context == reach < tiny("llama-mha").config.max_context
    speculation = Speculation("draft", draft_model=draft)
    recipe = Recipe(limits=Limits(max_context=100), speculation=speculation)
    with pytest.raises(ContextLengthError, match=f"reaches {reach} tokens"):
        Engine(tiny("llama-mha"), recipe)


def test_what_is_computed_of_a_page_is_known() -> None:
    pages = DraftPages(num_pages=10, page_size=4, table_shape=(3, 6))
    pages.follow(StepPlan(1, table_seats=[0] * 3, table_indexes=[0, 1, 2], table_pages=[7, 2, 5]))
    assert pages.start(0, 9, None) == 0
    pages.fill(0, 0, 9)
    assert pages.filled[[7, 2, 5]].tolist() == [4, 4, 1]
    assert pages.slots(0, 7, 10) == [11, 20, 21]
    assert pages.start(0, 11, None) == 9
    assert pages.start(0, 8, None) == 8, "the last token is always run"
    pages.follow(StepPlan(2, slots=[10, -1, 20], copies=[(2, 3)]))  # position 6 and 8 written anew
    assert pages.filled[[7, 2, 5, 3]].tolist() == [4, 2, 0, 4]
    assert pages.start(0, 9, None) == 6
    assert pages.start(0, 9, 2) == 8, "what the window has passed is not made up for"
