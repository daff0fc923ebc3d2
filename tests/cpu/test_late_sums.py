"""Residuals that the next norm adds (quantization/late_sums.py): the same bits as without, in every
size of step, and only where all projections can.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import engine_for, prompts_of, tiny
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.attention.paged import PagedSequences
from ridgeline.engine.steps.notes import noting
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.models import Transformer, transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import ResidualStream
from ridgeline.quantization.late_sums import LateSums, can_add_late, late_copy, with_late_sums
from ridgeline.quantization.linear import replace_layer
from ridgeline.quantization.nearest import nearest, quantize_nearest
from ridgeline.quantization.scheme import Scheme, parse_scheme

PROMPTS = prompts_of([90, 7, 70])  # a step of many rows, then of few
SAMPLING = Sampling(max_tokens=5, ignore_eos=True, logprobs=3)


def engine_of(name: str) -> Engine:
    """Its GPU path on a CPU: references instead of kernels, and otherwise the same."""
    engine = engine_for(tiny(name), scheme="fp8", kernels="reference", budget=512)
    engine.runner.passes.sequences = PagedSequences
    return engine


@pytest.mark.parametrize("name", ["llama-mqa-bias", "qwen3", "phi3-longrope-partial"])
def test_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []

    def counted(x_TD: Tensor, *about: Any, **more: Any) -> Any:
        if len(about) == 5:  # with a residual and codes
            added.append(len(x_TD))
        return rms_norm(x_TD, *about, **more)

    monkeypatch.setattr(transformer, "rms_norm", counted)
    expected = engine_of(name).generate(PROMPTS, [SAMPLING] * 3)
    assert not added
    engine = engine_of(name)
    engine.runner.passes.model = late_copy(engine.runner.model)
    found = engine.generate(PROMPTS, [SAMPLING] * 3)
    assert [output.completions for output in found] == [output.completions for output in expected]
    num_norms = 2 * engine.model.config.num_layers
    assert len(added) % (num_norms - 1) == 0  # all but the first, which has nothing to add
    assert min(added) >= 128


def test_a_sum_is_made_once() -> None:
    x_TD, update_TD = torch.randn(3, 8), torch.randn(3, 8)
    stream = ResidualStream(x_TD, update_TD)
    assert torch.equal(stream.total(), x_TD + update_TD)
    assert stream.total() is stream.total()
    norm = transformer.RMSNorm(8, 1e-6, 0.0)
    norm.weight = torch.nn.Parameter(torch.rand(8), requires_grad=False)
    late, dtype = ResidualStream(x_TD, update_TD), torch.float8_e4m3fn
    expected = rms_norm(x_TD + update_TD, norm.weight, norm.eps, quantized=dtype)
    for found, wanted in zip(late.rounded(norm, dtype), expected, strict=True):
        assert torch.equal(found.float(), wanted.float())
    assert torch.equal(late.total(), x_TD + update_TD)


def test_only_where_all_projections_can() -> None:
    fp8, int8 = parse_scheme("fp8"), parse_scheme("int8")

    def quantized(name: str, scheme: Scheme) -> Transformer:
        return quantize_nearest(with_kinds(tiny(name), lambda kind: kind), scheme)

    model = quantized("llama-mqa-bias", fp8)
    assert can_add_late(model)
    assert with_late_sums(model) is model  # on a CPU
    late = late_copy(model)
    assert late.adds_late
    assert not model.adds_late
    assert isinstance(late.get_submodule("layers.0.attn.qkv"), LateSums)
    assert late.embed.weight is model.embed.weight
    assert not can_add_late(late)  # nobody makes another of it
    for name, scheme in (("gemma2", fp8), ("mixtral", fp8), ("llama-mqa-bias", int8)):
        assert not can_add_late(quantized(name, scheme))
    plain = tiny("llama-mqa-bias")
    assert not can_add_late(plain)
    weight = plain.get_submodule("layers.0.mlp.down").weight
    assert isinstance(weight, Tensor)
    replace_layer(model, "layers.0.mlp.down", nearest("down", weight, None, int8, weight.dtype))
    assert not can_add_late(model)


def test_what_is_noted_has_its_shape() -> None:
    engine = engine_of("llama-mqa-bias")
    engine.runner.passes.model = late_copy(engine.runner.model)
    with noting(engine.runner.model) as notes:
        engine.generate(PROMPTS, [Sampling(max_tokens=1)] * 3)
    shapes = {note.op: note.shape for note in notes}
    assert shapes["layers.1.attn.qkv"] == (167, engine.model.config.hidden_size)
