"""Attention of packed documents: results and gradients are the definition's, and no document
changes another's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels import document_attention as attentions
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.document_attention import (
    AttentionPath,
    Documents,
    choose_path,
    document_attention,
)
from ridgeline.kernels.document_attention import reference as defined

LENGTHS = (5, 1, 17, 9)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = ((total, 4, 16), (total, 2, 16), (total, 2, 16))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("path", [None, "triton"])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.25),
        AttentionSpec(0.3, window=4),
        AttentionSpec(0.25, window=100),
        AttentionSpec(0.25, window=4, softcap=2.0),
    ],
    ids=["plain", "window", "wide window", "soft cap"],
)
def test_results_and_gradients_are_the_definitions(
    spec: AttentionSpec, path: AttentionPath | None
) -> None:
    documents = Documents.of(LENGTHS)
    own, plain = inputs(), inputs()
    out = document_attention(*own, documents, spec, path)
    expected = defined.document_attention(*plain, documents, spec)
    torch.testing.assert_close(out, expected)
    for result, wanted in zip(gradients(out, own), gradients(expected, plain), strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("path", [None, "triton"])
def test_a_document_changes_no_bit_of_another(path: AttentionPath | None) -> None:
    documents, spec = Documents.of(LENGTHS), AttentionSpec(0.25)
    plain, changed = inputs(torch.bfloat16), inputs(torch.bfloat16)
    with torch.no_grad():
        for tensor in changed:
            tensor[6:23] = 100.0
    rest = torch.ones(sum(LENGTHS), dtype=torch.bool)
    rest[6:23] = False
    outs = [document_attention(*each, documents, spec, path) for each in (plain, changed)]
    assert torch.equal(outs[0][rest], outs[1][rest])
    pairs = zip(gradients(outs[0], plain), gradients(outs[1], changed), strict=True)
    assert all(torch.equal(one[rest], two[rest]) for one, two in pairs)


KEYS = (9, 1, 17, 30)  # of documents with LENGTHS queries


def keyed_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((sum(LENGTHS), 4, 16), (sum(KEYS), 2, 16), (sum(KEYS), 2, 16))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("path", [None, "triton", "defined"])
@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.25), AttentionSpec(0.3, window=4), AttentionSpec(0.25, window=6, softcap=2.0)],
    ids=["plain", "window", "soft cap"],
)
def test_queries_are_the_last_of_more_keys(spec: AttentionSpec, path: AttentionPath | None) -> None:
    """As if all queries were there, and these were taken out of the result."""
    documents, keys = Documents.of(LENGTHS), Documents.of(KEYS)
    own, plain = keyed_inputs(), keyed_inputs()
    out = document_attention(*own, documents, spec, path, keys=keys)
    ends = torch.tensor(KEYS).cumsum(0).tolist()
    parts = zip(ends, LENGTHS, strict=True)
    rows = torch.cat([torch.arange(end - length, end) for end, length in parts])
    all_q = torch.zeros(sum(KEYS), 4, 16).index_copy(0, rows, plain[0])
    expected = defined.document_attention(all_q, *plain[1:], keys, spec)[rows]
    torch.testing.assert_close(out, expected)
    for result, wanted in zip(gradients(out, own), gradients(expected, plain), strict=True):
        torch.testing.assert_close(result, wanted)


def test_keys_that_do_not_fit_are_refused() -> None:
    q, k, v = keyed_inputs()
    documents = Documents.of(LENGTHS)
    for lengths in ((9, 1, 17, 29), (4, 6, 17, 30), (9, 1, 47)):
        with pytest.raises(ValueError, match="as many as queries or more"):
            document_attention(q, k, v, documents, AttentionSpec(1.0), keys=Documents.of(lengths))
    with pytest.raises(ValueError, match="'products' needs as many keys as queries"):
        document_attention(
            q, k, v, documents, AttentionSpec(1.0), "products", keys=Documents.of(KEYS)
        )


def test_varlen_attention_runs_only_where_it_aligns_queries_with_the_last_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.empty(8, 4, 16, dtype=torch.bfloat16, device="meta")
    lengths = Documents.of((4, 4)), AttentionSpec(1.0), False, Documents.of((4, 9))
    for aligns, path in ((True, "varlen"), (False, "triton")):
        monkeypatch.setattr(attentions, "aligns_at_end", lambda device, aligns=aligns: aligns)
        assert choose_path(q, *lengths) == path


def test_what_runs_hangs_on_lengths_cap_and_dtype() -> None:
    q = torch.empty(8, 4, 16, dtype=torch.bfloat16)
    assert choose_path(q, Documents.of((4, 4)), AttentionSpec(1.0)) == "each"
    assert choose_path(q, Documents.of((4, 4)), AttentionSpec(1.0, softcap=3.0)) == "defined"
    q = q.to("meta")
    assert choose_path(q, Documents.of((3, 5)), AttentionSpec(1.0)) == "varlen"
    assert choose_path(q, Documents.of((4, 4)), AttentionSpec(1.0, window=2)) == "varlen"
    assert choose_path(q, Documents.of((4, 4)), AttentionSpec(1.0, softcap=2.0)) == "triton"
    assert choose_path(q, Documents.of((3, 5)), AttentionSpec(1.0), deterministic=True) == "triton"


@pytest.mark.parametrize("lengths", [(8, 1), (31, 0, 1)])
def test_documents_that_are_not_the_batch_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="they must have all 32"):
        document_attention(*inputs(), Documents.of(lengths), AttentionSpec(1.0))
