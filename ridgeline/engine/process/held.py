"""A request as the supervising process holds it: everything needed to continue it in another
process from the tokens it already has.

A new request is sent as one part. When one with several outputs is continued, each output becomes
its own part with its own seed. Deltas are never delivered twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.engine.process.worker import Add, Token
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.state import Ask, End


class HeldPart(NamedTuple):
    """What the engine's process knows as one request."""

    request: Held
    first_sample: int  # its sample 0 is this one of the request's


@dataclass(eq=False)
class Held:
    ask: Ask
    live: LiveRequest
    numbers: list[int]  # of its parts that are in the engine's process
    num_trials: int = 0  # how often it was run alone as a suspect
    num_tokens: int = 0  # that came since it was last sent
    was_in_lost_step: bool = False  # of a process that died

    @property
    def open_samples(self) -> list[int]:
        """Outputs that have not ended."""
        samples = self.live.samples
        return [index for index, sample in enumerate(samples) if sample.finish_reason is None]

    @property
    def has_begun(self) -> bool:
        return any(sample.tokens for sample in self.live.samples)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether it may do so: it has one, and nothing has come of it yet."""
        return self.live.job.sampling.grammar is not None and not self.num_tokens

    def parts(self, numbers: Iterator[int]) -> Iterator[tuple[HeldPart, Add]]:
        """What is to be sent, each part with its number."""
        self.num_tokens = 0
        if not self.has_begun:
            yield HeldPart(self, 0), Add(replace(self.ask, request_id=next(numbers)), self.live.job)
            return
        for sample in self.open_samples:
            ask = replace(
                self.ask,
                request_id=next(numbers),
                num_samples=1,
                output=tuple(self.live.samples[sample].tokens),
                reuse_prefix=True,
                reuse_limit=None,
            )
            job: DeviceJob = replace(
                self.live.job, sampling=_continued(self.live.job.sampling, sample)
            )
            yield HeldPart(self, sample), Add(ask, job)

    def take(self, message: Token, sample: int) -> bool:
        """A token of one of the outputs. Whether a stop string ends that output now."""
        if self.live.samples[sample].finish_reason is not None:
            return False  # it came before the other side heard of the end
        self.num_tokens += 1
        if message.first_s is not None:
            self.live.engine_first_s = message.first_s
        return self.live.push(sample, message.token, message.logprob, message.reason)

    def ended(self, end: End) -> None:
        """It has ended. Of a stop string the other side may not have heard in time."""
        reason, samples = end.reason, self.live.samples
        if end.status == "finished" and len(samples) == 1:
            reason = samples[0].finish_reason or reason
        self.live.end(End(self.ask.request_id, end.status, reason, end.num_cached))


def _continued(sampling: Sampling, sample: int) -> Sampling:
    """The settings of one output that has begun, as a request of its own. Its prompt's
    log-probabilities are there.
    """
    return replace(
        sampling,
        n=1,
        best_of=None,
        seed=sampling.sample_seed(sample),
        logprobs=(sampling.logprobs or 0) if sampling.wants_logprobs else None,
        prompt_logprobs=None,
    )
