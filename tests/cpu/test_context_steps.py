"""Steps in which ranks share the tokens of a sequence are those of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import TINY
from process_ranks import run_ranks
from rank_work import LENGTH, hidden_beside, sequences
from test_layout_steps import TRAIN, check_steps, shape

from ridgeline.data.loading.packing import joined
from ridgeline.errors import UsageError
from ridgeline.models.families import describe_hf
from ridgeline.parallel.context import key_needs, pieces, positions
from ridgeline.parallel.layout import Layout
from ridgeline.training.ranks.context import context_cut, row_parts
from ridgeline.training.stepping.context import CutBatch

GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
WINDOWS = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 5,
}


def test_steps_with_several_sequences_in_a_row() -> None:
    check_steps("context=2", shape(), micro=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "context=2,shard=2",
        "context=2,replicate=2",
        "context=2,tensor=2",
        "context=2,tensor=2,sequence=false",
        "context=4",
    ],
)
def test_steps_of_pairs(layout: str) -> None:
    check_steps(layout, shape())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [WINDOWS, GEMMA], ids=["windows", "soft caps"])
def test_steps_with_windows_and_soft_caps(changes: dict[str, Any]) -> None:
    check_steps("context=2", shape(**changes), micro=4)


@pytest.mark.slow
def test_steps_with_angles_by_the_whole_documents_length() -> None:
    rope = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4}
    check_steps("context=2", shape(**rope))


@pytest.mark.slow
def test_steps_that_compute_blocks_again() -> None:
    check_steps("context=2", shape(), train=replace(TRAIN, recomputation="blocks"))


@pytest.mark.parametrize("perturbed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_document_changes_no_bit_of_another_on_any_rank(perturbed: int) -> None:
    config = describe_hf(TINY, origin="tiny").config
    layout = Layout(context=2)
    for are_same, differs in run_ranks(layout, hidden_beside, config, perturbed):
        assert are_same
        assert differs


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([None, 1, 3, 50]),
)
def test_every_rank_gets_the_keys_that_its_queries_see(
    documents: list[list[int]], context: int, window: int | None
) -> None:
    """And no others, each once, from the rank that has it."""
    length = -(-max(map(sum, documents)) // (2 * context)) * 2 * context
    lengths = [n for row in documents for n in (*row, length - sum(row)) if n]
    layout, num_tokens = Layout(context=context), sum(lengths)
    parts = [row_parts(layout, rank, length, num_tokens) for rank in range(context)]
    held = [positions(each) for each in parts]
    needs = [key_needs(parts, lengths, window, rank) for rank in range(context)]
    ends = np.repeat(np.cumsum(lengths), lengths)
    begins = ends - np.repeat(lengths, lengths)
    for rank, own in enumerate(needs):
        got = [held[rank], *(held[i][each.sent[rank]] for i, each in enumerate(needs))]
        assert own.received == tuple(map(len, got[1:]))
        there = np.concatenate(got)
        keys, first = there[own.key_rows], 0
        wanted = set()
        for piece, num_keys in zip(pieces(parts[rank], lengths), own.key_lengths, strict=True):
            begin, last = begins[piece.tokens.start], piece.tokens.stop
            if window is not None:
                begin = max(begin, piece.tokens.start - window + 1)
            assert keys[first : first + num_keys].tolist() == list(range(begin, last))
            wanted |= set(range(begin, last))
            first += num_keys
        assert first == len(keys)
        others = np.concatenate(got[1:]).tolist()
        assert sorted(others) == sorted(wanted - set(held[rank].tolist()))
    assert needs[0].are_any_sent == any(sum(each.received) for each in needs)


@pytest.mark.parametrize("context", [2, 4, 8])
def test_rows_that_are_sent_are_those_of_the_formula(context: int) -> None:
    """Of docs/parallel.md: what a rank receives forward and, as it sent so much, backward."""
    length = 16 * context
    parts = [Layout(context=context).tokens(rank, length) for rank in range(context)]
    for rank in range(context):
        needs = key_needs(parts, [length], None, rank)
        rows = sum(needs.received) + sum(map(len, needs.sent))
        assert rows == 2 * length * 3 * (context - 1) / (4 * context)
        assert len(needs.key_rows) <= length * (1 + 1 / (2 * context))
    short = [length // (2 * context)] * (2 * context)
    assert not key_needs(parts, short, None, 0).are_any_sent


def test_a_cut_batch_stays_one_where_it_is_copied() -> None:
    config = describe_hf(TINY | WINDOWS, origin="tiny").config
    batch = joined(sequences(2, config.vocab_size))
    cut = context_cut(config, Layout(context=2), 1, LENGTH)(batch)
    copied = cut.to(torch.device("cpu"))
    assert isinstance(copied, CutBatch)
    assert (copied.lengths, copied.num_targets) == (cut.lengths, cut.num_targets)
    plan = copied.key_plans[5]
    assert sum(plan.lengths) == len(plan.key_rows) == plan.starts[-1]
    assert context_cut(config, Layout(shard=2), 1, LENGTH)(batch) is batch


def test_sequences_that_cannot_be_shared_are_refused() -> None:
    config = describe_hf(TINY, origin="tiny").config
    with pytest.raises(UsageError, match="cannot be cut in 2 × 3 parts for context=3; try 12"):
        context_cut(config, Layout(context=3), 0, 16)
    with pytest.raises(UsageError, match="which tensor=4 cannot share; try 16 tokens"):
        context_cut(config, Layout(context=2, tensor=4), 0, 20)
    context_cut(config, Layout(context=2, tensor=4, sequence=False), 0, 20)
