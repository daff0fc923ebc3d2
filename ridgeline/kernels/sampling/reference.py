"""The definition of sampling for one row of logits.

The draw is the largest of logit + Gumbel noise, which follows the softmax exactly. The noise of a
vocabulary entry comes from a counter-based generator keyed by (seed, position, entry): a request's
tokens depend on its seed and on nothing else, whatever shares its batch. The generator is
Philox-4x32 with ten rounds (Salmon et al., SC 2011), which Triton has too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def sample(
    logits_V: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> Tensor:
    """The chosen token id (a tensor without dims). Temperature 0 is greedy: the first of the
    largest logits.
    """
    if temperature == 0:
        return logits_V.argmax()
    kept_V = filtered_logits(
        logits_V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return (kept_V + gumbel_noise(seed, position, logits_V.shape[0], logits_V.device)).argmax()


def filtered_logits(
    logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Logits over temperature, with -inf for entries that the filters drop, each seeing what the
    last one left:

    top_k keeps the k largest (and ties with the k-th; 0: all); top_p keeps the fewest whose
    probability reaches p; min_p keeps those with at least min_p times the largest probability.
    """
    kept_V = logits_V.float() / temperature
    if 0 < top_k < kept_V.shape[0]:
        kept_V = kept_V.masked_fill(kept_V < kept_V.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        sorted_V, order_V = torch.softmax(kept_V, dim=-1).sort(descending=True, stable=True)
        before_V = sorted_V.cumsum(-1) - sorted_V  # probability of all that rank higher
        kept_V = kept_V.index_fill(0, order_V[before_V >= top_p], float("-inf"))
    if min_p > 0.0:
        probability_V = torch.softmax(kept_V, dim=-1)
        kept_V = kept_V.masked_fill(probability_V < min_p * probability_V.max(), float("-inf"))
    return kept_V


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """One draw of the standard Gumbel distribution for each vocabulary entry."""
    entry_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    bits_V = _philox(entry_V, position, seed)
    # 24 bits, the middle of each step: never 0 or 1, so both logarithms are finite.
    uniform_V = ((bits_V >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform_V)).float()


def _philox(counter: Tensor, position: int, seed: int) -> Tensor:
    """The first of Philox's four 32-bit outputs, for counters (counter, position, 0, 0) under a
    64-bit key.
    """
    c0 = counter
    c1 = torch.full_like(counter, position & _LOW_32)
    c2 = torch.zeros_like(counter)
    c3 = torch.zeros_like(counter)
    key0, key1 = seed & _LOW_32, (seed >> 32) & _LOW_32
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW_32, (key1 + _KEY_STEPS[1]) & _LOW_32
    return c0


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low halves of the 64-bit product of two unsigned 32-bit numbers, held in int64.

    The halves of `a` are multiplied apart, because the product may not fit into the signed 64 bits
    torch has.
    """
    upper = (a >> 16) * b
    lower = (a & 0xFFFF) * b
    middle = (upper & 0xFFFF) * 65536 + lower
    return (upper >> 16) + (middle >> 32), middle & _LOW_32
