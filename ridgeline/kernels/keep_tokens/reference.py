"""The definition of keeping a step's tokens: where the host and the next step look for them, and
whether each was chosen from logits that are numbers.

Sampling chooses a NaN where a row holds one, so the chosen token's logit tells for the whole row.
Letters: R rows of logits, V vocabulary, N tokens that there is room for.
"""

from __future__ import annotations

from torch import Tensor


def keep_tokens(
    logits_RV: Tensor, tokens_R: Tensor, results_2N: Tensor, last_N: Tensor | None = None
) -> None:
    """**Changes in place** the first R columns of `results_2N` (int32): the tokens, and 1 where the
    token's logit is NaN, else 0; and the first R of `last_N` (int32), where given: the tokens. Of
    more rows than there is room for, those at the end only fill up a graph's shape, and are left
    out.
    """
    count = min(len(tokens_R), results_2N.shape[1])
    tokens = tokens_R[:count].long()
    chosen = logits_RV[:count].gather(1, tokens.unsqueeze(1)).squeeze(1)
    results_2N[0, :count] = tokens
    results_2N[1, :count] = chosen.isnan()
    if last_N is not None:
        last_N[:count] = tokens
