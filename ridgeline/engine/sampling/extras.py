"""What some requests want beside tokens: log-probabilities of their output or their prompt, or the
hidden states of their tokens as an embedding.

Made on the device from the step's hidden states and logits, sent to the host with the tokens, and
there turned into what callers see. Letters: T tokens, R rows of logits, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.choosing import TokenLogprob, listed, ranked_logprobs
from ridgeline.engine.sampling.scoring import Scoring
from ridgeline.engine.sampling.thinking import AnyMatcher
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.transfer import to_device, to_host

Pooling = Literal["last", "mean"]
ROWS_AT_ONCE = 64  # rows of the vocabulary that are made together


@dataclass(frozen=True)
class DeviceJob:
    """What the device has to know of a request."""

    sampling: Sampling  # with a seed
    prompt: tuple[int, ...]
    stop_ids: frozenset[int]
    pooling: Pooling | None = None  # for an embedding: nothing is sampled
    # With a grammar, or a limit to its thinking: one for each output, which it follows.
    matchers: tuple[AnyMatcher, ...] = ()
    scoring: Scoring | None = None  # takes the prompt's logits: no log-probabilities are listed
    first_scored: int = 1  # token of the prompt from which on logits are wanted, where they are

    def completes(self, sample: int, token: int) -> bool:
        """Whether an output's next token completes what its grammar asks for; a GrammarError if
        that does not allow it.
        """
        if not self.matchers:
            return False
        self.matchers[sample].accept(token)
        return self.matchers[sample].is_complete

    @property
    def makes_tokens(self) -> bool:
        return self.pooling is None and self.scoring is None

    @property
    def first_computed(self) -> int | None:
        """The first token of the prompt that has to be computed even where the prefix cache has it;
        None: only the last.
        """
        if self.pooling is not None:
            return 0
        return None if self.sampling.prompt_logprobs is None else self.first_scored - 1

    def predicting(self, first: int, num_tokens: int) -> range:
        """Which of the prompt's tokens from `first` on, counted from there, have logits that are
        wanted.
        """
        if self.sampling.prompt_logprobs is None:
            return range(0)
        begin = max(0, self.first_scored - 1 - first)
        return range(begin, max(begin, min(num_tokens, len(self.prompt) - 1 - first)))


Jobs = Mapping[Hashable, DeviceJob]


class PromptPart(NamedTuple):
    """Log-probabilities of the tokens of a prompt from `first` on."""

    request_id: Hashable
    first: int
    logprobs: list[TokenLogprob]


class EmbeddingPart(NamedTuple):
    """Of the tokens from `first` on: their sum, or for pooling "last" the last one's state."""

    request_id: Hashable
    first: int
    num_tokens: int
    state: Tensor  # [D], fp32, on the host


@dataclass
class Extras:
    """Of one step, once it is on the host."""

    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by sample
    prompts: list[PromptPart] = field(default_factory=list)
    embeddings: list[EmbeddingPart] = field(default_factory=list)


Pending = list[Callable[[Extras], None]]  # to be called when the copies have arrived


def output_logprobs(
    plan: StepPlan, jobs: Jobs, logits_RV: Tensor, tokens_R: Tensor, numbers: Sequence[int]
) -> Pending:
    """Of the samples whose requests ask for them; `numbers` are theirs in the whole step."""
    wanted = [
        index for index, key in enumerate(plan.sample_keys) if jobs[key[0]].sampling.wants_logprobs
    ]
    pending: Pending = []
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        part = wanted[start : start + ROWS_AT_ONCE]
        tops = [jobs[plan.sample_keys[index][0]].sampling.logprobs or 0 for index in part]
        rows = to_device(part, logits_RV.device)
        tokens = tokens_R.index_select(0, rows)
        ranked = ranked_logprobs(logits_RV.index_select(0, rows), tokens, max(tops))
        pending.append(_note_samples([numbers[index] for index in part], tops, tokens, ranked))
    return pending


def _note_samples(
    numbers: list[int], tops: list[int], tokens: Tensor, ranked: tuple[Tensor, ...]
) -> Callable[[Extras], None]:
    arrived = [to_host(tensor) for tensor in (tokens, *ranked)]

    def note(extras: Extras) -> None:
        for number, top, entry in zip(numbers, tops, listed(*arrived), strict=True):
            extras.logprobs[number] = entry._replace(top=entry.top[:top])

    return note


def of_rows(
    plan: StepPlan,
    jobs: Jobs,
    hidden_TD: Tensor,
    to_logits: Callable[[Tensor], Tensor],
) -> Pending:
    """Prompt log-probabilities and embeddings of the rows whose requests ask for them."""
    pending: Pending = []
    start = sum(plan.num_tokens[: plan.num_decode_rows])
    for row in range(plan.num_decode_rows, len(plan.keys)):
        request_id, first = plan.keys[row][0], plan.first_positions[row]
        end = start + plan.num_tokens[row]
        job, states_TD = jobs[request_id], hidden_TD[start:end]
        if job.pooling is not None:
            pending.append(_embedding(request_id, first, job.pooling, states_TD))
        if job.sampling.prompt_logprobs is not None:
            rows = job.predicting(first, len(states_TD))
            states_TD = states_TD[rows.start : rows.stop]
            pending += _prompt_logprobs(request_id, first + rows.start, job, states_TD, to_logits)
        start = end
    return pending


def _embedding(
    request_id: Hashable, first: int, pooling: Pooling, states_TD: Tensor
) -> Callable[[Extras], None]:
    count = len(states_TD)
    state_D = to_host(states_TD.float().sum(0) if pooling == "mean" else states_TD[-1].float())
    part = EmbeddingPart(request_id, first, count, state_D)
    return lambda extras: extras.embeddings.append(part)


def _prompt_logprobs(
    request_id: Hashable,
    first: int,
    job: DeviceJob,
    states_TD: Tensor,
    to_logits: Callable[[Tensor], Tensor],
) -> Pending:
    """A token's state says how likely the next one was."""
    nexts = job.prompt[first + 1 : first + 1 + len(states_TD)]
    tokens_T = to_device(nexts, states_TD.device, torch.int64)
    pending: Pending = []
    for start in range(0, len(nexts), ROWS_AT_ONCE):
        tokens = tokens_T[start : start + ROWS_AT_ONCE]
        logits = to_logits(states_TD[start : start + len(tokens)])
        if job.scoring is not None:
            pending.append(_note_scores(job.scoring, first + 1 + start, logits, tokens))
            continue
        ranked = ranked_logprobs(logits, tokens, job.sampling.prompt_logprobs or 0)
        pending.append(_note_prompt(request_id, first + 1 + start, tokens, ranked))
    return pending


def _note_prompt(
    request_id: Hashable, first: int, tokens: Tensor, ranked: tuple[Tensor, ...]
) -> Callable[[Extras], None]:
    arrived = [to_host(tensor) for tensor in (tokens, *ranked)]
    return lambda extras: extras.prompts.append(PromptPart(request_id, first, listed(*arrived)))


def _note_scores(
    scoring: Scoring, first: int, logits_RV: Tensor, tokens_R: Tensor
) -> Callable[[Extras], None]:
    arrived = to_host(scoring.score(first, logits_RV, tokens_R))
    return lambda extras: scoring.take(first, arrived)
