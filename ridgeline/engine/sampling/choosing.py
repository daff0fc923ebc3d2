"""How one output's tokens are chosen, one row of logits at a time: the definition that the batched
sampling of the engine is tested against.

Penalties see the prompt and the output so far, a bias is added, stop tokens are ruled out until
there are enough tokens, and so is what a grammar does not allow (matching.py), then
kernels/sampling's reference chooses. Log-probabilities are the
model's own, before all of that. Letters: V vocabulary.

    chooser = Chooser(sampling, prompt, vocab_size, stop_ids={2}, device=logits_V.device)
    chosen = chooser.choose(logits_V)
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.thinking import AnyMatcher
from ridgeline.errors import NumericsError, UsageError
from ridgeline.kernels.sampling import sample
from ridgeline.kernels.sampling.reference import adjusted_logits


class TokenLogprob(NamedTuple):
    """A token's natural log-probability, and the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # token and log-probability, the likeliest first


class Chosen(NamedTuple):
    token: int
    logprob: TokenLogprob | None  # where it was asked for


class Chooser:
    """Chooses the tokens of one output in turn."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        stop_ids: Collection[int],
        device: torch.device,
        sample_index: int = 0,
        matcher: AnyMatcher | None = None,
    ) -> None:
        if sampling.is_matched and matcher is None:
            raise UsageError(
                "the sampling has a grammar or a limit to its thinking; give the Matcher that "
                "follows it"
            )
        self.matcher = matcher
        self.sampling, self.seed = sampling, sampling.sample_seed(sample_index)
        self.prompt_length, self.count = len(prompt), 0  # tokens chosen so far
        self.stop_ids = sorted(stop_ids)
        self.counts_V = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen_V[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self.bias_V = torch.zeros(vocab_size, device=device)
        for token, bias in sampling.logit_bias.items():
            self.bias_V[token] = bias

    def choose(self, logits_V: Tensor) -> Chosen:
        sampling, position = self.sampling, self.prompt_length + self.count
        adjusted_V = self._adjusted(logits_V)
        token = sample(
            adjusted_V,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=self.seed,
            position=position,
        )
        if adjusted_V[token].isnan():  # where a logit is NaN, one of those is chosen
            raise NumericsError(nan_message(position))
        if self.matcher is not None:
            self.matcher.accept(int(token))
        self.count += 1
        self.counts_V[token] += 1
        if not sampling.wants_logprobs:
            return Chosen(int(token), None)
        (logprob,) = logprobs_of(logits_V[None], token[None], sampling.logprobs or 0)
        return Chosen(int(token), logprob)

    @property
    def is_complete(self) -> bool:
        """Whether a grammar is complete with the tokens so far."""
        return self.matcher is not None and self.matcher.is_complete

    def _adjusted(self, logits_V: Tensor) -> Tensor:
        sampling, bias_V = self.sampling, self.bias_V
        too_early = self.count < sampling.min_tokens and self.stop_ids
        mask = None if self.matcher is None else self.matcher.mask()
        if not (sampling.has_penalties or sampling.logit_bias or too_early or mask is not None):
            return logits_V
        if too_early:
            bias_V = bias_V.clone()
            bias_V[self.stop_ids] = float("-inf")
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed_V = torch.from_numpy(bits[: len(bias_V)]).bool().to(bias_V.device)
            bias_V = bias_V.masked_fill(~allowed_V, float("-inf"))
        return adjusted_logits(
            logits_V,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            output_counts_V=self.counts_V,
            prompt_seen_V=self.seen_V,
            bias_V=bias_V,
        )


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> list[TokenLogprob]:
    """Each row's token with its log-probability, and the likeliest ones with theirs."""
    return listed(tokens_R, *ranked_logprobs(logits_RV, tokens_R, num_top))


def ranked_logprobs(
    logits_RV: Tensor, tokens_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens [R], and of the likeliest ones [R, num_top] and their ids."""
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R = logprobs_RV.gather(1, tokens_R.long().unsqueeze(1)).squeeze(1)
    values, ids = logprobs_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    return chosen_R, values, ids


def listed(tokens_R: Tensor, chosen_R: Tensor, values: Tensor, ids: Tensor) -> list[TokenLogprob]:
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)
    ]


def best_samples(outputs: Sequence[Sequence[TokenLogprob]], num_best: int) -> list[int]:
    """Which outputs have the highest mean log-probability, the best first."""

    def mean(index: int) -> float:
        return sum(entry.logprob for entry in outputs[index]) / max(len(outputs[index]), 1)

    return sorted(range(len(outputs)), key=mean, reverse=True)[:num_best]


def with_seed(sampling: Sampling) -> Sampling:
    """The same sampling with a seed drawn where none was given."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(32))


def check_tokens(sampling: Sampling, vocab_size: int) -> None:
    """An error for token ids that the model does not have."""
    for name in ("logit_bias", "stop_ids"):
        for token in getattr(sampling, name):
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"{name} has token id {token}; the model's vocabulary has {vocab_size}"
                )


def ends_of(eos_ids: Collection[int], sampling: Sampling, vocab_size: int) -> tuple[int, ...]:
    """Those of a tokenizer's end-of-text tokens that end an output. A tokenizer may name some that
    the model does not have: they are never chosen, and have no logit to rule out.
    """
    if sampling.ignore_eos:
        return ()
    return tuple(token for token in eos_ids if token < vocab_size)


NO_NUMBERS = "are not numbers (NaN)"


def nan_message(position: int) -> str:
    return (
        f"the model's logits at position {position} {NO_NUMBERS}: its weights hold "
        "NaN, or values overflow in fp16; try --dtype fp32 or another checkpoint"
    )
