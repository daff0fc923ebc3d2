"""Who writes what of a checkpoint: every element of every tensor arrives, and all write as much."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import TINY

from ridgeline.models.families import describe_hf
from ridgeline.models.families.names import parts
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.layout import Layout
from ridgeline.training.ranks.weights.gathering import place
from ridgeline.training.ranks.weights.local_model import read_region, whole_shapes
from ridgeline.training.saving.deal import DealtTensor, deal

DENSE = describe_hf(TINY, origin="tiny").config
MOE = describe_hf(
    TINY
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    origin="tiny",
).config


def make_layout(**degrees: int) -> Layout:
    layout = Layout(**degrees)
    return replace(layout, expert=1 if layout.size_of("gradient") % 2 else 2)


LAYOUTS = st.builds(
    make_layout,
    replicate=st.integers(1, 2),
    shard=st.sampled_from([1, 2, 5, 8]),
    context=st.integers(1, 2),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 2),
)
KINDS = {"weight": 2, "first": 4, "second": 4}


def dealt(config, layout: Layout, file_bytes: int = 1 << 30) -> list[DealtTensor]:  # type: ignore[no-untyped-def]
    rounds = deal(Holdings(config, layout), whole_shapes(config), KINDS, file_bytes)
    return [each for files in rounds for file in files for each in file.tensors]


@given(LAYOUTS, st.sampled_from([DENSE, MOE]))
@pytest.mark.slow
def test_every_element_arrives_from_a_rank_that_has_it(layout: Layout, config) -> None:  # type: ignore[no-untyped-def]
    holdings, shapes = Holdings(config, layout), whole_shapes(config)
    tensors = dealt(config, layout)
    assert Counter(each.stored for each in tensors) == Counter(
        f"{kind}.{name}" for kind in KINDS for name in shapes
    )
    for each in tensors:
        if each.kind != "first":
            continue  # parts are those of the parameter, whoever writes it
        numbers = torch.arange(prod(each.shape)).view(each.shape)
        whole = torch.full_like(numbers, -1)
        for rank, region in each.sources:
            part = holdings.of(each.parameter, each.shape, rank)
            assert part is not None
            assert part.region == region
            place(whole, region, read_region(numbers, region))
        assert torch.equal(whole, numbers)
        sent = {each.sent_by(rank) for rank in range(layout.size)} - {None}
        assert sent == {(part, source.region) for part, source in enumerate(each.sources)}
        for part, source in enumerate(each.sources):
            assert each.sent_by(source.rank) == (part, source.region)
        assert each.owner in {source.rank for source in each.sources}


@given(LAYOUTS)
def test_all_write_as_much(layout: Layout) -> None:
    """No rank is ahead of the mean by more than a tensor; the stages of a pipeline may differ."""
    tensors = dealt(DENSE, layout)
    for stage in range(layout.pipeline):
        ranks = [r for r in range(layout.size) if layout.coordinates(r).pipeline == stage]
        own = [each for each in tensors if each.owner in ranks]
        written: Counter[int] = Counter()
        for each in own:
            written[each.owner] += each.num_bytes
        mean = sum(written.values()) / len(ranks)
        assert max(written.values()) <= mean + max(each.num_bytes for each in own)


def test_copies_are_not_sent() -> None:
    for each in dealt(DENSE, Layout(replicate=4)):
        assert [source.rank for source in each.sources] == [each.owner]


def test_the_nearest_copy_is_sent_to_the_one_with_the_fewest_bytes() -> None:
    """As a plain search over all ranks has it."""
    layout = Layout(replicate=3, shard=2, tensor=2)
    tensors, num_bytes = dealt(DENSE, layout), dict.fromkeys(range(layout.size), 0)
    order = {name: i for i, name in enumerate(dict.fromkeys(each.stored for each in tensors))}
    kinds = {f"{kind}.{name}": (list(KINDS).index(kind), i) for kind in KINDS
             for i, name in enumerate(whole_shapes(DENSE))}  # fmt: skip
    assert order.keys() == kinds.keys()
    for each in sorted(tensors, key=lambda each: (-each.num_bytes, kinds[each.stored])):
        ranks = [rank for _, own in each.holders.parts for rank in own]
        assert each.owner == min(ranks, key=lambda rank: (num_bytes[rank], rank))
        num_bytes[each.owner] += each.num_bytes
        for source, (_, own) in zip(each.sources, each.holders.parts, strict=True):
            assert source.rank == min(own, key=lambda rank: (abs(rank - each.owner), rank))


def test_names_are_those_of_one_set_of_files() -> None:
    rounds = deal(Holdings(DENSE, Layout(shard=3)), whole_shapes(DENSE), KINDS, 8_000)
    for stem in ("model", "optimizer"):
        names = [file.name for files in rounds for file in files if file.stem == stem]
        count = len(names)
        assert count > 3
        expected = {f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}
        assert set(names) == expected
    for files in rounds:
        owners = [file.owner for file in files]
        assert len(set(owners)) == len(owners)
        for file in files:
            size = sum(each.num_bytes for each in file.tensors)
            assert size <= 8_000 or len(file.tensors) == 1


def test_every_parameter_has_its_stored_pieces() -> None:
    """`deal` names whole parameters, a checkpoint their pieces."""
    description = describe_hf(TINY, origin="tiny")
    pieces = {each.parameter for each in parts(description.config, description.names)}
    assert pieces == whole_shapes(description.config).keys()
