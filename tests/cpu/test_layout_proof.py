"""`--prove`: a layout that computes what one device does passes; one that does not is told by
parameter and axis.
"""

from __future__ import annotations

import pytest
from packed import TINY
from process_ranks import run_ranks
from rank_work import proven, proven_with_a_mutant

from ridgeline.models.families import describe_hf
from ridgeline.parallel.layout import Layout

CONFIG = describe_hf(TINY | {"num_hidden_layers": 5}, origin="tiny").config


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
