"""The definition of sampling, for one row of logits and for a batch of rows.

The draw is the largest of logit + Gumbel noise, which follows the softmax exactly, taken in two
steps: first among groups of neighbouring vocabulary entries, each standing for the sum of its
probabilities, then among the entries of the chosen group. By the same rule that is an exact draw
too, and it needs noise for some hundreds of numbers where a draw in one step needs it for the whole
vocabulary: the arithmetic of the noise would take a GPU four times as long as reading the logits.

The noise comes from a counter-based generator keyed by (seed, position, group or entry): a
request's tokens depend on its seed and on nothing else, whatever shares its batch. The generator is
Philox-4x32 with ten rounds (Salmon et al., SC 2011), which Triton has too.

Letters: B rows (one a request), V vocabulary, G groups, S entries of a group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 256  # neighbouring entries that stand together in the first step of a draw
SMALLEST_TEMPERATURE = 1e-6  # as good as greedy; below it logits over temperature would overflow
ENTRY_STREAM, GROUP_STREAM = 0, 1  # the generator's third counter: which noise is drawn

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF


def sample_rows(
    logits_BV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    min_p_B: Tensor | None = None,
    repetition_B: Tensor | None = None,
    presence_B: Tensor | None = None,
    frequency_B: Tensor | None = None,
    output_counts_BV: Tensor | None = None,
    prompt_seen_BV: Tensor | None = None,
    bias_BV: Tensor | None = None,
) -> Tensor:
    """The chosen token ids [B], int64: `sample` for each row, after penalties and bias.

    None stands for a filter, penalty or table that no row uses. seed_B is int64 and may use all 64
    bits (a seed from 2^63 on as its two's complement), position_B int32 or int64; rows with
    temperature 0 are greedy.
    """
    tokens = []
    for row in range(logits_BV.shape[0]):

        def of(values: Tensor | None, neutral: float, row: int = row) -> float:
            return neutral if values is None else values[row].item()

        adjusted_V = adjusted_logits(
            logits_BV[row],
            repetition=of(repetition_B, 1.0),
            presence=of(presence_B, 0.0),
            frequency=of(frequency_B, 0.0),
            output_counts_V=None if output_counts_BV is None else output_counts_BV[row],
            prompt_seen_V=None if prompt_seen_BV is None else prompt_seen_BV[row],
            bias_V=None if bias_BV is None else bias_BV[row],
        )
        tokens.append(
            sample(
                adjusted_V,
                temperature=of(temperature_B, 0.0),
                top_k=int(of(top_k_B, 0)),
                top_p=of(top_p_B, 1.0),
                min_p=of(min_p_B, 0.0),
                seed=int(seed_B[row]),
                position=int(position_B[row]),
            )
        )
    if not tokens:
        return torch.empty(0, dtype=torch.int64, device=logits_BV.device)
    return torch.stack(tokens)


def adjusted_logits(
    logits_V: Tensor,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    output_counts_V: Tensor | None = None,
    prompt_seen_V: Tensor | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Logits in fp32 after penalties and bias, in this order:

    repetition divides a positive and multiplies a negative logit of every token in the prompt or
    the output; frequency is taken off once for each time a token is in the output, presence once
    if it is there at all; the bias is added as it is.
    """
    adjusted_V = logits_V.float()
    seen_V = torch.zeros_like(adjusted_V, dtype=torch.bool)
    counts_V = torch.zeros_like(adjusted_V)
    if output_counts_V is not None:
        counts_V = output_counts_V.float()
        seen_V = counts_V > 0
    if prompt_seen_V is not None:
        seen_V = seen_V | prompt_seen_V
    if repetition != 1.0:
        changed_V = torch.where(adjusted_V > 0, adjusted_V / repetition, adjusted_V * repetition)
        adjusted_V = torch.where(seen_V, changed_V, adjusted_V)
    if frequency or presence:
        adjusted_V = adjusted_V - (counts_V * frequency + (counts_V > 0) * presence)
    return adjusted_V if bias_V is None else adjusted_V + bias_V.float()


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
    largest logits. Where a logit is NaN, a NaN is chosen, so that the caller can see it.
    """
    if temperature == 0:
        return logits_V.argmax()
    kept_V = filtered_logits(
        logits_V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    padding = -kept_V.shape[0] % GROUP
    kept_GS = functional.pad(kept_V, (0, padding), value=float("-inf")).view(-1, GROUP)
    group_G = torch.logsumexp(kept_GS, dim=-1)
    if len(group_G) > 1:  # the only one needs no noise to be the largest
        index_G = torch.arange(len(group_G), device=kept_V.device)
        group_G = group_G + _gumbel(index_G, seed, position, GROUP_STREAM)
    group = group_G.argmax()
    entry_S = group * GROUP + torch.arange(GROUP, device=kept_V.device)
    noise_S = _gumbel(entry_S, seed, position, ENTRY_STREAM)
    return entry_S[(kept_GS[group] + noise_S).argmax()]


def filtered_logits(
    logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Logits over temperature, with -inf for entries that the filters drop, each seeing what the
    last one left:

    top_k keeps the k largest (0: all); top_p keeps the fewest whose probability reaches p; both
    keep ties with the last one they keep, so that what is kept never depends on an order among
    equals. min_p keeps those with at least min_p times the largest probability. So all that the
    filters do is to find the smallest logit that is kept.
    """
    logits_V = logits_V.float()
    scaled_V = logits_V * inverse_temperature(temperature)
    lowest = torch.full((), float("-inf"), device=logits_V.device)  # the smallest logit kept
    if 0 < top_k < logits_V.shape[0]:
        lowest = logits_V.topk(top_k).values[-1]
    if top_p < 1.0:
        left_V = scaled_V.masked_fill(logits_V < lowest, float("-inf"))
        sorted_V, order_V = torch.softmax(left_V.double(), dim=-1).sort(descending=True)
        before_V = sorted_V.cumsum(-1) - sorted_V  # probability of all that rank higher
        last = order_V[(before_V < top_p).sum().clamp(min=1) - 1]
        lowest = torch.maximum(lowest, logits_V[last])
    if min_p > 0.0:
        # exp((logit - largest) / temperature) >= min_p, solved for the logit
        below = math.log(min_p) / inverse_temperature(temperature)
        lowest = torch.maximum(lowest, logits_V.max() + below)
    return scaled_V.masked_fill(logits_V < lowest, float("-inf"))


def inverse_temperature(temperature: float) -> float:
    """What logits are multiplied with; rounded to fp32 as the kernel holds it."""
    return _fp32(1.0 / _fp32(max(temperature, SMALLEST_TEMPERATURE)))


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """One draw of the standard Gumbel distribution for each vocabulary entry."""
    entry_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return _gumbel(entry_V, seed, position, ENTRY_STREAM)


def _gumbel(index: Tensor, seed: int, position: int, stream: int) -> Tensor:
    bits = _philox(index, position, seed, stream)
    # 24 bits, the middle of each step: never 0 or 1, so both logarithms are finite.
    uniform = ((bits >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform)).float()


def _philox(counter: Tensor, position: int, seed: int, stream: int = 0) -> Tensor:
    """The first of Philox's four 32-bit outputs, for counters (counter, position, stream, 0) under
    a 64-bit key.
    """
    c0 = counter
    c1 = torch.full_like(counter, position & _LOW_32)
    c2 = torch.full_like(counter, stream)
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

    It may not fit into the signed 64 bits torch has, where it wraps around: its bits are the same.
    """
    product = a * b
    return (product >> 32) & _LOW_32, product & _LOW_32


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
