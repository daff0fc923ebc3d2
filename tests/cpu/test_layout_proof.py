"""`--prove`: a layout that computes what one device does passes; one that does not is told by
parameter and axis.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packed import TINY
from process_ranks import run_ranks
from rank_work import proven, proven_with_a_mutant

from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.layout import Layout
from ridgeline.training.ranks.proving import cut_down

CONFIG = describe_hf(TINY | {"num_hidden_layers": 5}, origin="tiny").config


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-30b-a3b", "mixtral-8x7b"])
@pytest.mark.parametrize("words", ["shard=2", "shard=3,tensor=2"])
def test_a_large_shape_is_cut_down_with_the_same_remainders(shape: str, words: str) -> None:
    model, layout = describe_shape(shape).config, Layout.parse(words)
    small = cut_down(model, layout)
    assert small.num_layers == 2
    pairs = [(model.vocab_size, small.vocab_size), (model.mlp_size, small.mlp_size)]
    for whole, own in zip(model.layers, small.layers, strict=False):
        if whole.experts is not None and own.experts is not None:
            assert own.experts.num_experts == whole.experts.num_experts
            pairs.append((whole.experts.mlp_size, own.experts.mlp_size))
    for whole_size, size in pairs:
        assert size == whole_size or size % (64 * layout.size) == whole_size % (64 * layout.size)
    assert small.mlp_size < 2048 + 2 * 64 * layout.size or small.mlp_size == model.mlp_size
    rest = {"layers": model.layers, "vocab_size": model.vocab_size, "mlp_size": model.mlp_size}
    assert replace(small, **rest) == model


def test_a_right_layout_passes() -> None:
    for proof in run_ranks(Layout.parse("shard=2,tensor=2"), proven, CONFIG):
        assert proof.num_layers == 2
        assert proof.worst < 1e-5


@pytest.mark.parametrize(
    ("layout", "mutant", "words"),
    [
        ("shard=2", "mean", "averaged, not summed over shard"),
        ("tensor=2", "norms counted twice", "the gradient norm of step 1"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (
                    "replicate=2",
                    "no data sum",
                    "sequences alone: the sum over replicate is missing",
                ),
                ("tensor=2", "no tensor sum", "norm.weight"),
                ("pipeline=2", "tied twice", "embed.weight on rank 0 is 2 times what it must be"),
                ("shard=2", "norm over one mesh", "the gradient norm of step 1"),
            )
        ),
    ],
)
def test_a_wrong_one_is_told(layout: str, mutant: str, words: str) -> None:
    for told in run_ranks(Layout.parse(layout), proven_with_a_mutant, CONFIG, mutant):
        assert words in told
        assert "nothing was trained" in told
