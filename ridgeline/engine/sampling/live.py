"""A request on the host while it runs: tokens become text, stop strings are watched for, and what
was asked for beside the text is gathered.

The scheduler knows it as an `Ask`, the runner as a `DeviceJob`; here is what its caller sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.data.incremental import IncrementalDecoder
from ridgeline.engine.requests.request import FinishReason, Sampling
from ridgeline.engine.requests.thinking import stop_watcher
from ridgeline.engine.sampling.choosing import TokenLogprob, best_samples
from ridgeline.engine.sampling.extras import DeviceJob, EmbeddingPart, PromptPart
from ridgeline.engine.sampling.outputs import Completion, Delta, Event, Output
from ridgeline.engine.scheduling.state import End

Sink = Callable[[Event], None]


class LiveSample:
    """One output while it grows."""

    def __init__(self, job: DeviceJob, tokenizer: Tokenizer | None) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None
        self._stop_ids = job.stop_ids
        self._decoder = None if tokenizer is None else decoder_for(job.sampling, tokenizer)
        self._watcher = stop_watcher(job.sampling.stop, job.sampling.thinking)

    def push(self, token: int, logprob: TokenLogprob | None) -> str:
        """Take a token and return the text that is certain now. A stop token has none."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self._decoder is None or token in self._stop_ids:
            return ""
        return self._keep(self._watcher.push(self._decoder.push(token)))

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended it."""
        return self._watcher.match

    def finish(self, reason: FinishReason) -> str:
        """No more tokens come: what was held back is text after all."""
        self.finish_reason = reason
        held = "" if self._decoder is None else self._decoder.finish()
        return self._keep(self._watcher.push(held) + self._watcher.finish())

    def _keep(self, text: str) -> str:
        if text:
            self.pieces.append(text)
        return text


def decoder_for(sampling: Sampling, tokenizer: Tokenizer) -> IncrementalDecoder:
    """From an output's tokens to its text. Thinking tags have text, special tokens or not."""
    thinking = sampling.thinking
    tags = () if thinking is None else (thinking.open_tag, thinking.close_tag)
    ids = [tokenizer.special_id(tag) for tag in tags]
    return tokenizer.decoder(
        skip_special_tokens=sampling.skip_special_tokens,
        # A grammar sees a first space, so it is text: see Tokenizer.decoder.
        continuation=sampling.grammar is not None,
        shown=frozenset(token for token in ids if token is not None),
    )


class LiveRequest:
    def __init__(
        self, request_id: Hashable, job: DeviceJob, tokenizer: Tokenizer | None, sink: Sink
    ) -> None:
        self.request_id, self.job, self.sink = request_id, job, sink
        sampling = job.sampling
        self._has_deltas = sampling.num_samples == sampling.n  # else the best are not known yet
        self._tells_logprobs = sampling.logprobs is not None
        self.samples = [LiveSample(job, tokenizer) for _ in range(job.sampling.num_samples)]
        self.prompt_logprobs: dict[int, TokenLogprob] = {}  # by position
        self.embedding: Tensor | None = None  # the sum so far, or the last state
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.engine_first_s: float | None = None  # as the engine's own process measured it

    def push(
        self, sample: int, token: int, logprob: TokenLogprob | None, reason: FinishReason | None
    ) -> bool:
        """A token of one output; `reason` if it is the last. Whether a stop string ends it now."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        live = self.samples[sample]
        text = live.push(token, logprob)
        is_stopped = live.stop_text is not None
        stops = is_stopped and reason is None
        ended: FinishReason | None = "stop" if is_stopped else reason
        if ended is not None:
            text += live.finish(ended)
        if self._has_deltas:
            logprobs = (logprob,) if self._tells_logprobs and logprob is not None else ()
            self.sink(Delta(self.request_id, sample, text, (token,), ended, logprobs))
        return stops

    def take_prompt(self, part: PromptPart) -> None:
        self.prompt_logprobs |= dict(enumerate(part.logprobs, part.first))

    def take_embedding(self, part: EmbeddingPart) -> None:
        """Tokens come in order; after a preemption they come again from the first one."""
        if self.job.pooling == "mean" and part.first > 0 and self.embedding is not None:
            self.embedding = self.embedding + part.state
        else:
            self.embedding = part.state

    def end(self, end: End) -> None:
        """The request has ended, as it may."""
        now, sampling = time.monotonic(), self.job.sampling
        assert sampling.seed is not None, "a request has a seed when it is added"
        first_token_s = None if self.first_token is None else self.first_token - self.arrived
        self.sink(
            Output(
                request_id=self.request_id,
                status=end.status,
                reason=end.reason,
                num_prompt_tokens=len(self.job.prompt),
                seed=sampling.seed,
                completions=self._completions(end),
                prompt_logprobs=self._prompt_logprobs(end),
                embedding=self._pooled(end),
                first_token_s=first_token_s,
                total_s=now - self.arrived,
                num_cached_tokens=end.num_cached,
                engine_first_token_s=self.engine_first_s,
            )
        )

    def _completions(self, end: End) -> tuple[Completion, ...]:
        sampling, order = self.job.sampling, range(self.job.sampling.n)
        if sampling.num_samples > sampling.n and end.status == "finished":
            order = best_samples([live.logprobs for live in self.samples], sampling.n)  # type: ignore[assignment]
        wants_logprobs = sampling.logprobs is not None
        return tuple(
            Completion(
                "".join(live.pieces),
                tuple(live.tokens),
                live.finish_reason,
                tuple(live.logprobs) if wants_logprobs else None,
                live.stop_text,
            )
            for live in (self.samples[index] for index in order)
        )

    def _prompt_logprobs(self, end: End) -> tuple[TokenLogprob | None, ...] | None:
        if self.job.sampling.prompt_logprobs is None or end.status != "finished":
            return None
        return tuple(self.prompt_logprobs.get(index) for index in range(len(self.job.prompt)))

    def _pooled(self, end: End) -> Tensor | None:
        if self.job.pooling is None or self.embedding is None or end.status != "finished":
            return None
        scale = len(self.job.prompt) if self.job.pooling == "mean" else 1
        return torch.nn.functional.normalize(self.embedding / scale, dim=0)
