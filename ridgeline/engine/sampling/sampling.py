"""Choosing the tokens of a step, for all its samples at once, on the device.

Most samples need their logits, a temperature and filters: one call that a graph can hold
(`plain`). Those with penalties, a bias, or stop tokens that are ruled out for now go through a
second call with tables of the vocabulary (`Special`), a few rows at a time, so that the tables stay
small. A grammar's mask becomes a bias there; it is asked for while the forward pass runs. What each
setting means is choosing.py's. Letters: R samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.masks import Masks
from ridgeline.engine.sampling.thinking import AnyMatcher
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepInputs
from ridgeline.engine.steps.transfer import to_device
from ridgeline.kernels.sampling import sample_rows
from ridgeline.kernels.sampling.reference import GROUP

ROWS_AT_ONCE = 64  # rows with tables that are sampled together: 33 MB each table at 128k entries


def plain(logits_RV: Tensor, inputs: StepInputs, filtered: bool) -> Tensor:
    """Token ids [R]; `filtered` says whether a row asks for top-k, top-p or min-p."""
    filters = {}
    if filtered:
        filters = {"top_k_B": inputs.top_k, "top_p_B": inputs.top_p, "min_p_B": inputs.min_p}
    if logits_RV.device.type == "cpu":
        return _plain_on_cpu(logits_RV, inputs, filters)
    return sample_rows(
        logits_RV, inputs.temperature, inputs.seeds, inputs.draw_positions, **filters
    )


def _plain_on_cpu(logits_RV: Tensor, inputs: StepInputs, filters: dict[str, Tensor]) -> Tensor:
    """The reference goes row by row: only for rows that are not greedy."""
    tokens_R = _argmax(logits_RV)
    drawn = inputs.temperature.nonzero().squeeze(1)
    if len(drawn):
        chosen = {name: values[drawn] for name, values in filters.items()}
        tokens_R[drawn] = sample_rows(
            logits_RV[drawn],
            inputs.temperature[drawn],
            inputs.seeds[drawn],
            inputs.draw_positions[drawn],
            **chosen,
        )
    return tokens_R


def _argmax(logits_RV: Tensor) -> Tensor:
    """The first of each row's largest: by groups, whose maxima torch finds ten times as fast."""
    num_rows, vocab_size = logits_RV.shape
    whole = vocab_size - vocab_size % GROUP
    if whole < 2 * GROUP:
        return logits_RV.argmax(-1)
    groups_RGS = logits_RV[:, :whole].view(num_rows, -1, GROUP)
    group_R = groups_RGS.amax(-1).argmax(-1)
    entries_RS = groups_RGS[torch.arange(num_rows), group_R]
    tokens_R = group_R * GROUP + entries_RS.argmax(-1)
    if whole == vocab_size:
        return tokens_R
    rest_R = whole + logits_RV[:, whole:].argmax(-1)
    pairs_R2 = torch.stack((tokens_R, rest_R), dim=1)
    return pairs_R2.gather(1, logits_RV.gather(1, pairs_R2).argmax(-1, keepdim=True)).squeeze(1)


@dataclass(frozen=True)
class Seated:
    """A stream with settings that need tables."""

    sampling: Sampling
    prompt_length: int
    stop_ids: list[int]
    matcher: AnyMatcher | None = None

    @property
    def is_active(self) -> bool:
        """Whether the next token needs more than the plain choice. Where nothing but the length of
        a thought is watched, that is at its end.
        """
        if self.sampling.has_tables or self.matcher is None:
            return True
        return self.matcher.mask() is not None

    def bias(self, draw_position: int) -> Iterator[tuple[int, float]]:
        """Tokens, and what is added to their logits for the token at this position."""
        banned = draw_position - self.prompt_length < self.sampling.min_tokens
        ruled_out = self.stop_ids if banned else ()
        for token, bias in self.sampling.logit_bias.items():
            if token not in ruled_out:
                yield token, bias
        for token in ruled_out:
            yield token, float("-inf")


class Special:
    """The seats with penalties, a bias, a least number of tokens or a grammar, and what for."""

    def __init__(self, max_batch: int, vocab_size: int, device: torch.device) -> None:
        self.shape, self.device = (max_batch, vocab_size), device
        self.seats: dict[int, Seated] = {}
        self.masks = Masks(vocab_size, device)
        self.counts_SV: Tensor | None = None  # of each token in the output, by seat
        self.seen_SV: Tensor | None = None  # whether it is in the prompt

    def sit(
        self,
        seat: int,
        sampling: Sampling,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Collection[int],
        matcher: AnyMatcher | None = None,
    ) -> None:
        """A stream takes a seat, with the tokens it has so far."""
        self.seats.pop(seat, None)
        if not sampling.needs_tables:
            return
        if matcher is not None:
            matcher.follow(output)
        self.seats[seat] = Seated(sampling, len(prompt), sorted(stop_ids), matcher)
        if sampling.has_penalties:
            counts_SV, seen_SV = self._tables()
            counts_SV[seat] = self._counted(output)
            seen_SV[seat] = self._counted(prompt) > 0

    def samples(self, plan: StepPlan) -> list[int]:
        """Which samples of a step need tables."""
        if not self.seats:
            return []
        seats = self.seats
        return [
            index
            for index, seat in enumerate(plan.sample_seats)
            if seat in seats and seats[seat].is_active
        ]

    def choose(
        self, logits_RV: Tensor, inputs: StepInputs, plan: StepPlan, tokens_R: Tensor
    ) -> None:
        """Write the tokens of these samples into `tokens_R`, and count them."""
        samples = self.samples(plan)
        for start in range(0, len(samples), ROWS_AT_ONCE):
            self._choose(samples[start : start + ROWS_AT_ONCE], logits_RV, inputs, plan, tokens_R)

    def _choose(
        self,
        samples: list[int],
        logits_RV: Tensor,
        inputs: StepInputs,
        plan: StepPlan,
        tokens_R: Tensor,
    ) -> None:
        rows = to_device(samples, self.device)
        seated = [self.seats[plan.sample_seats[index]] for index in samples]
        chosen = sample_rows(
            logits_RV.index_select(0, rows),
            inputs.temperature[rows],
            inputs.seeds[rows],
            inputs.draw_positions[rows],
            top_k_B=inputs.top_k[rows],
            top_p_B=inputs.top_p[rows],
            min_p_B=inputs.min_p[rows],
            bias_BV=self._bias(samples, seated, plan),
            **self._penalties(samples, seated, plan),
        )
        tokens_R[rows] = chosen
        if self.counts_SV is not None:
            seats = to_device([plan.sample_seats[index] for index in samples], self.device)
            ones = torch.ones_like(chosen, dtype=torch.int32)
            self.counts_SV.index_put_((seats, chosen), ones, accumulate=True)

    def _bias(self, samples: list[int], seated: list[Seated], plan: StepPlan) -> Tensor | None:
        entries = [
            (row, token, bias)
            for row, (sample, seat) in enumerate(zip(samples, seated, strict=True))
            for token, bias in seat.bias(plan.positions[plan.logit_tokens[sample]] + 1)
        ]
        bias_RV = self._mask_bias(seated)
        if not entries:
            return bias_RV
        if bias_RV is None:
            bias_RV = torch.zeros(len(samples), self.shape[1], device=self.device)
        rows, tokens, values = zip(*entries, strict=True)
        where = to_device((rows, tokens), self.device)
        added = to_device(values, self.device, torch.float32)
        return bias_RV.index_put_((where[0], where[1]), added, accumulate=True)

    def _mask_bias(self, seated: list[Seated]) -> Tensor | None:
        """-inf for what grammars do not allow; None where there are none."""
        masks = [None if seat.matcher is None else seat.matcher.mask() for seat in seated]
        return None if all(mask is None for mask in masks) else self.masks.bias(masks)

    def _penalties(
        self, samples: list[int], seated: list[Seated], plan: StepPlan
    ) -> dict[str, Tensor]:
        """The arguments of `sample_rows` for penalties; lines of seats without any go unread."""
        if not any(seat.sampling.has_penalties for seat in seated):
            return {}
        counts_SV, seen_SV = self._tables()
        seats = to_device([plan.sample_seats[index] for index in samples], self.device)

        def each(name: str) -> Tensor:
            values = [getattr(seat.sampling, f"{name}_penalty") for seat in seated]
            return to_device(values, self.device, torch.float32)

        return {
            "repetition_B": each("repetition"),
            "presence_B": each("presence"),
            "frequency_B": each("frequency"),
            "output_counts_BV": counts_SV.index_select(0, seats),
            "prompt_seen_BV": seen_SV.index_select(0, seats),
        }

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Made when the first stream asks for penalties; the memory plan counts with them."""
        if self.counts_SV is None or self.seen_SV is None:
            self.counts_SV = torch.zeros(self.shape, dtype=torch.int32, device=self.device)
            self.seen_SV = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
        return self.counts_SV, self.seen_SV

    def _counted(self, tokens: Sequence[int]) -> Tensor:
        counts = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=self.shape[1])
        return to_device(counts.astype(np.int32), self.device)
