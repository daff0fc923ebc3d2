"""The definition of prompt lookup, for all samples of a step at once.

A sample belongs to a stream in a seat, whose tokens so far are a line of `history`. The step has
chosen the token behind them, and one more behind each draft it verified. A draft is confirmed when
it is the token that was chosen in its place, as long as all before it were.

Then the longest run of last tokens, from `max_ngram` down to `min_ngram` of them, is looked for
earlier in the line; of equally long ones the latest counts. What followed there is drafted
here, over and over where it reaches the end of the line: text that repeats itself goes on
doing so. Where nothing is found the draft is the last token again.

Letters: S seats, L tokens of the longest stream, K drafts, R rows of logits, N samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_NGRAM = 16  # a longer run is not looked for: it would find what this one finds


class Streams(NamedTuple):
    """All seats' tokens and drafts, and which runs are looked for."""

    history: Tensor  # [S, L], int32
    drafts: Tensor  # [S, K], int32
    min_ngram: int
    max_ngram: int


class LookupResults(NamedTuple):
    """Where a step's verdicts go, int32."""

    out: Tensor  # [3, N]; its rows may lie apart
    last: Tensor  # [N or more], the last token that each sample has brought


def prompt_lookup(
    streams: Streams, tokens_R: Tensor, samples_4N: Tensor, into: LookupResults | None = None
) -> Tensor:
    """`samples_4N` has each sample's seat, its first row of logits, how many drafts were verified
    in the rows behind it, and the position of its first token. All tensors are int32.

    Returns, for each sample, how many tokens it has brought (the confirmed drafts and one more),
    whether the first draft was right (verified or not), and the length of the run that was found
    for the new drafts, 0 if none; in `into.out` where that is given.
    **Changes in place**: the seats' lines of `streams.history` take the tokens, those of its drafts
    the new drafts; and the first N of `into.last` the last tokens.
    """
    history_SL, drafts_SK, min_ngram, max_ngram = streams
    seats_N, rows_N, verified_N, positions_N = samples_4N.long()
    num_right_N, first_N = accepted(tokens_R, drafts_SK[seats_N], rows_N, verified_N)
    counts_N = num_right_N + 1
    _keep(history_SL, tokens_R, counts_N, seats_N, rows_N, positions_N)
    if into is not None:
        into.last[: len(rows_N)] = tokens_R[rows_N + num_right_N]
    lengths_N = positions_N + counts_N
    lines_NL = history_SL[seats_N, : int(lengths_N.max())]
    ends_N, found_N = _find(lines_NL, lengths_N, min_ngram, max_ngram)
    steps_K = torch.arange(drafts_SK.shape[1], device=lines_NL.device)
    places_NK = ends_N[:, None] + steps_K % (lengths_N - ends_N)[:, None]
    drafts_SK[seats_N] = lines_NL.gather(1, places_NK)
    found_3N = torch.stack((counts_N, first_N.long(), found_N)).int()
    return found_3N if into is None else into.out.copy_(found_3N)


def accepted(
    tokens_R: Tensor, drafts_NK: Tensor, rows_N: Tensor, verified_N: Tensor
) -> tuple[Tensor, Tensor]:
    """How many of each sample's verified drafts are confirmed, and whether the first draft, be it
    verified or not, is what was chosen.
    """
    steps_K = torch.arange(drafts_NK.shape[1], device=tokens_R.device)
    places_NK = (rows_N[:, None] + steps_K).clamp(max=len(tokens_R) - 1)
    right_NK = tokens_R[places_NK] == drafts_NK
    confirmed_NK = right_NK & (steps_K < verified_N[:, None])
    return confirmed_NK.long().cumprod(1).sum(1), right_NK[:, 0]


def _keep(
    history_SL: Tensor,
    tokens_R: Tensor,
    counts_N: Tensor,
    seats_N: Tensor,
    rows_N: Tensor,
    positions_N: Tensor,
) -> None:
    for step in range(int(counts_N.max())):
        has = counts_N > step
        history_SL[seats_N[has], positions_N[has] + step] = tokens_R[rows_N[has] + step]


def _find(
    lines_NL: Tensor, lengths_N: Tensor, min_ngram: int, max_ngram: int
) -> tuple[Tensor, Tensor]:
    """Where the best earlier run ends, and its length; the last token and 0 where there is none."""
    width = lines_NL.shape[1]
    ends_L = torch.arange(width, device=lines_NL.device)
    alike_NL = ends_L < lengths_N[:, None]  # a run ends before the last token
    alike_NL[:, 0] = False
    run_NL = torch.zeros_like(lines_NL)
    for back in range(1, min(max_ngram, width - 1) + 1):
        last_N1 = lines_NL.gather(1, (lengths_N - back).clamp(min=0)[:, None])
        alike_NL[:, :back] = False
        alike_NL[:, back:] &= lines_NL[:, :-back] == last_N1
        run_NL += alike_NL
    score_NL = torch.where(run_NL >= min_ngram, run_NL * width + ends_L, 0)
    best_N = score_NL.amax(1).long()
    found_N = best_N // width
    return torch.where(found_N > 0, best_N % width, lengths_N - 1), found_N
