"""Steps that are the beginnings of prompts, all of one length: the GPU's path on a CPU, references
instead of kernels.
"""

from __future__ import annotations

import pytest
from engines import assert_exact, engine_for, prompts_of, tiny
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.attention import fresh_prompts as subject
from ridgeline.engine.attention.paged import PagedSequences
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.prefill_attention import Packing

prompt_attention = subject.prompt_attention


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts whose attention was made from the projection, layer by layer."""
    found: list[int] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
        found.append(packing.max_new or 0)
        return prompt_attention(q, k, v, packing, spec)

    monkeypatch.setattr(subject, "prompt_attention", counted)
    monkeypatch.setattr(subject, "choose_path", lambda *_: "cudnn")
    monkeypatch.setattr(subject, "LENGTH_STEP", 16)
    return found


def like_gpu(engine: Engine) -> Engine:
    engine.runner.passes.sequences = PagedSequences
    return engine


@pytest.mark.parametrize("name", ["llama-mha", "qwen3", "phi3-longrope-partial"])
def test_they_are_exact(name: str, taken: list[int]) -> None:
    """Norms of keys and partly turned heads included; what follows reads the pages."""
    engine = like_gpu(engine_for(tiny(name), budget=64, prefix_cache=False))
    assert_exact(engine, prompts_of([32, 32]), [Sampling(max_tokens=6)] * 2)
    assert taken == [32] * engine.model.config.num_layers


def test_all_others_read_pages(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several lengths, of one that does not come again, after a prefix, with 8-bit pages."""
    for lengths, about in (
        ([32, 16], {}),
        ([31, 31], {}),
        ([96], {"budget": 32}),
        ([32, 32], {"kv_dtype": "int8"}),
    ):
        engine = like_gpu(engine_for(tiny("llama-mha"), **{"budget": 64} | about))
        outputs = engine.generate(prompts_of(lengths), Sampling(max_tokens=3))
        assert {output.status for output in outputs} == {"finished"}
    assert taken == [32] * engine.model.config.num_layers  # the first piece of the long one
    monkeypatch.setattr(subject, "choose_path", lambda *_: "triton")
    like_gpu(engine_for(tiny("llama-mha"), budget=64)).generate(prompts_of([32, 32]))
    assert len(taken) == engine.model.config.num_layers
