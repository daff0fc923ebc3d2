"""Prompt lookup on a GPU: one program a sample, which confirms, keeps and looks up in one go.

The table is walked once, a block of places at a time; at each place the run of tokens that ends
there is compared with the stream's last ones, and length and place together are one number whose
largest is the answer. Tokens chosen in this step are read from where the step left them: they are
stored into the table by the same program, which need not wait to see its own stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.prompt_lookup.reference import LONGEST_NGRAM, LookupResults, Streams

BLOCK = 1024  # places looked at together; not measured yet
LONGEST_HISTORY = 1 << 26
RUN = tl.constexpr(LONGEST_HISTORY)  # a score is the length of a run times this, and its place


@triton.jit
def token_at(place, line_ptr, rows_ptr, position, mask):
    """The stream's token at a place: of the table, or from `position` on of this step."""
    old = tl.load(line_ptr + place, mask=mask & (place < position), other=0)
    new = tl.load(rows_ptr + (place - position), mask=mask & (place >= position), other=0)
    return tl.where(place < position, old, new)


@triton.jit
def prompt_lookup_kernel(
    history_ptr,
    drafts_ptr,
    tokens_ptr,
    samples_ptr,
    out_ptr,
    last_ptr,
    history_stride,
    samples_stride,
    out_stride,
    HAS_LAST: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0)
    seat = tl.load(samples_ptr + sample).to(tl.int64)  # int64: tables pass 2^31 elements
    row = tl.load(samples_ptr + samples_stride + sample)
    verified = tl.load(samples_ptr + 2 * samples_stride + sample)
    position = tl.load(samples_ptr + 3 * samples_stride + sample)
    line_ptr = history_ptr + seat * history_stride
    own_drafts = drafts_ptr + seat * NUM_DRAFTS
    rows_ptr = tokens_ptr + row

    # How many drafts are confirmed.
    first_right = (tl.load(own_drafts) == tl.load(rows_ptr)).to(tl.int32)
    right = first_right * (verified > 0).to(tl.int32)
    confirmed = right
    for step in tl.static_range(1, NUM_DRAFTS):
        inside = step < verified
        draft = tl.load(own_drafts + step)
        token = tl.load(rows_ptr + step, mask=inside, other=0)
        right = right * (inside & (draft == token)).to(tl.int32)
        confirmed += right
    count = confirmed + 1
    length = position + count

    # The longest run that is found again, the latest of those.
    best = tl.full((BLOCK,), 0, tl.int32)
    for start in range(1, length, BLOCK):
        ends = start + tl.arange(0, BLOCK)
        alike = ends < length
        run = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(1, MAX_NGRAM + 1):
            last = token_at(length - back, line_ptr, rows_ptr, position, length >= back)
            alike = alike & (ends >= back)
            found = token_at(ends - back, line_ptr, rows_ptr, position, alike)
            alike = alike & (found == last)
            run += alike.to(tl.int32)
        score = tl.where(run >= MIN_NGRAM, run * RUN + ends, 0)
        best = tl.maximum(best, score)
    score = tl.max(best, axis=0)
    matched = score // RUN
    end = tl.where(matched > 0, score % RUN, length - 1)

    # What followed there, over and over; then what this step chose goes into the table.
    steps = tl.arange(0, DRAFT_BLOCK)
    inside = steps < NUM_DRAFTS
    drafts = token_at(end + steps % (length - end), line_ptr, rows_ptr, position, inside)
    kept = steps < count
    tokens = tl.load(rows_ptr + steps, mask=kept, other=0)
    tl.store(own_drafts + steps, drafts, mask=inside)
    tl.store(line_ptr + position + steps, tokens, mask=kept)
    tl.store(out_ptr + sample, count)
    tl.store(out_ptr + out_stride + sample, first_right)
    tl.store(out_ptr + 2 * out_stride + sample, matched)
    if HAS_LAST:
        tl.store(last_ptr + sample, tl.load(rows_ptr + confirmed))


def prompt_lookup(
    streams: Streams, tokens_R: Tensor, samples_4N: Tensor, into: LookupResults | None = None
) -> Tensor:
    """All int32; the lines of the history, of `samples_4N` and of `into.out` may lie apart,
    everything else is contiguous.
    """
    history_SL, drafts_SK, min_ngram, max_ngram = streams
    for name, tensor in (("drafts", drafts_SK), ("tokens", tokens_R)):
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    for tensor in (history_SL, samples_4N):
        assert tensor.stride(1) == 1, "tokens of a line lie side by side, and so do samples"
    if max_ngram > LONGEST_NGRAM or history_SL.shape[1] >= LONGEST_HISTORY:
        raise UnsupportedError(
            f"runs of {max_ngram} tokens in lines of {history_SL.shape[1]}; the kernel takes at "
            f"most {LONGEST_NGRAM} in lines below {LONGEST_HISTORY}"
        )
    num_samples, num_drafts = samples_4N.shape[1], drafts_SK.shape[1]
    if into is not None:
        out = into.out
    else:
        out = torch.empty((3, num_samples), dtype=torch.int32, device=tokens_R.device)
    if not num_samples:
        return out
    last = out if into is None else into.last
    assert into is None or (last.is_contiguous() and len(last) >= num_samples)
    tensors = (history_SL, drafts_SK, tokens_R, samples_4N, out, last)
    launch(
        prompt_lookup_kernel,
        (num_samples,),
        (*tensors, history_SL.stride(0), samples_4N.stride(0), out.stride(0)),
        HAS_LAST=into is not None,
        NUM_DRAFTS=num_drafts,
        DRAFT_BLOCK=max(2, triton.next_power_of_2(num_drafts + 1)),
        MIN_NGRAM=min_ngram,
        MAX_NGRAM=max_ngram,
        BLOCK=BLOCK,
        num_warps=BLOCK // (4 * target_of(tokens_R).warp_size),
    )
    return out
