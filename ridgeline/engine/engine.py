"""The engine: many requests through one model at once.

Owns what a user calls and how a request is checked; the main loop is loop.py's, how a model gets
here loading.py's.

    engine = Engine("demo")
    for output in engine.generate(["The sky is", "Water is"], Sampling(max_tokens=32)):
        print(output.text)
    for delta in engine.stream("Once upon a time", Sampling(temperature=0.8)):
        print(delta.text, end="", flush=True)

    request_id = engine.add(prompt, sampling)       # or by hand, for a server
    while engine.has_work:
        for event in engine.step(): ...

    with Engine("demo", Recipe(parallel=Parallel(tensor=3))) as engine: ...     # see ranks.py

One thread at a time: nothing in it is locked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.loop import EngineProgress, Loop, Stepping
from ridgeline.engine.naive import check_prompt
from ridgeline.engine.ranks import load_on_ranks
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.choosing import check_tokens, ends_of, with_seed
from ridgeline.engine.sampling.extras import DeviceJob, Pooling
from ridgeline.engine.sampling.live import LiveRequest, Sink
from ridgeline.engine.sampling.matching import Grammars, check_installed
from ridgeline.engine.sampling.outputs import Delta, Event, Output
from ridgeline.engine.sampling.scoring import RowScore, Scoring
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.engine.speculation.speculation import prepare
from ridgeline.engine.steps.rope_tables import rope_regime
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.models import ModelConfig, Transformer
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe

Prompt = str | Sequence[int]


class Engine:
    def __init__(
        self,
        model: Transformer | str | Path,
        recipe: Recipe | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        num_pages: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`num_pages` takes fewer pages of KV cache than the memory plan allows."""
        loaded, members = load_on_ranks(model, recipe, tokenizer, device, progress)
        self.model, self.tokenizer, self.recipe, self.memory_plan, draft, self.choices = loaded
        self.config = self.model.config
        pages = min(num_pages or self.memory_plan.num_pages, self.memory_plan.num_pages)
        self.max_context = self.recipe.limits.filled().max_context
        configs = [model.config for model in (self.model, draft) if model is not None]
        about = (self.model, self.recipe, pages, self.memory_plan.bytes_of("graphs"))
        self.runner = Runner(*about) if members is None else TensorRunner(*about, *members)
        draft_bytes = self.memory_plan.bytes_of("draft graphs")
        policy = prepare(self.runner, self.recipe, draft, widest_window(configs), draft_bytes)
        ahead = policy is not None and policy.ahead
        self.scheduler = Scheduler(scheduler_config(configs, self.recipe, pages, ahead))
        grammars = None
        if self.tokenizer is not None:
            grammars = Grammars(self.tokenizer, self.config.vocab_size)
        self._loop: Stepping = Loop(
            self.scheduler, self.runner, self.recipe.overlap, grammars, policy
        )
        self._events: list[Event] = []  # of requests that were added by hand
        self._numbers = count()

    def close(self) -> None:
        """Let go of what it holds beyond this process: the ranks of tensor parallel."""
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Output]:
        """The outputs of all prompts, in their order; `sampling` is one for all or one for each.
        What cannot run at all is an error before anything runs; what goes wrong later is in its
        output's status.
        """
        asked = _as_list(prompts)
        samplings = _for_each(sampling, len(asked))
        jobs = [self.job(prompt, each) for prompt, each in zip(asked, samplings, strict=True)]
        return self._run_all(jobs)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Delta]:
        """One prompt's output piece by piece. An end other than by stop or length is an error."""
        events: deque[Event] = deque()
        request_id = self._submit(self.job(prompt, sampling or Sampling()), events.append)
        try:
            while True:
                while events:
                    event = events.popleft()
                    if isinstance(event, Output):
                        event.raise_unless_finished()
                        return
                    yield event
                self._loop.advance()
        finally:
            self.cancel(request_id)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last") -> Tensor:
        """Embeddings of unit length [prompts, hidden size], fp32: of the last token's hidden
        state, or of the mean of all.
        """
        nothing = Sampling(max_tokens=1)
        jobs = [self.job(prompt, nothing, pooling) for prompt in _as_list(prompts)]
        found = []
        for output in self._run_all(jobs):
            output.raise_unless_finished()
            assert output.embedding is not None, "a finished embedding is there"
            found.append(output.embedding)
        return torch.stack(found)

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        scores: RowScore | Sequence[RowScore],
        first: int | Sequence[int] = 1,
        progress: Progress | None = None,
    ) -> list[Tensor]:
        """What `scores`, one for all or one for each, makes of the logits that predict a prompt's
        tokens from `first` on (see scoring.py): a row for each. What lies before may be found in
        the prefix cache.
        """
        num = len(prompts)
        functions = [scores] * num if callable(scores) else list(scores)
        firsts = [first] * num if isinstance(first, int) else list(first)
        jobs = [self._scoring_job(*each) for each in zip(prompts, functions, firsts, strict=True)]
        for output in self._run_all([job for job, _ in jobs], progress):
            output.raise_unless_finished()
        return [scoring.scores_TC for _, scoring in jobs]

    def _scoring_job(
        self, tokens: Sequence[int], score: RowScore, first: int
    ) -> tuple[DeviceJob, Scoring]:
        """Nothing follows the prompt, so that it may fill the context."""
        if not 1 <= first < len(tokens):
            raise UsageError(
                f"{len(tokens)} tokens are to be scored from number {first} on; each needs one "
                "before it; give at least two tokens, and a first one below their number"
            )
        check_prompt(self.config, tokens[-1:])
        check_prompt(self.config, tokens[:-1])
        self._check_context(len(tokens) - 1)
        scoring = Scoring(score, first, len(tokens))
        sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=0)
        job = DeviceJob(sampling, tuple(tokens), frozenset(), scoring=scoring, first_scored=first)
        return job, scoring

    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        request_id: Hashable = None,
        priority: int = 0,
        timeout_s: float | None = None,
        salt: str = "",
        pooling: Pooling | None = None,
    ) -> Hashable:
        """Take a request; its events come from `step`. `salt` keeps tenants' prefixes apart;
        with `pooling` it is a prompt to embed.
        """
        job = self.job(prompt, sampling or Sampling(), pooling)
        return self._submit(
            job, self._events.append, request_id, priority=priority, timeout_s=timeout_s, salt=salt
        )

    def step(self) -> list[Event]:
        """One step of everything; what it brought for requests that were added by hand."""
        self._loop.advance()
        events, self._events[:] = list(self._events), []
        return events

    def cancel(self, request_id: Hashable) -> bool:
        """End a request now; False if it has ended already."""
        return self._loop.cancel(request_id)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: no prompt that comes now finds its beginning computed."""
        self.scheduler.cache.clear()

    @property
    def ranks_a_device(self) -> int:
        """How many ranks share a device's bandwidth and matrix units: on a CPU all of them do. What
        `model` costs is one rank's part.
        """
        return self.recipe.parallel.tensor if self.model.embed.weight.device.type == "cpu" else 1

    @property
    def has_work(self) -> bool:
        return self._loop.has_work

    @property
    def progress(self) -> EngineProgress:
        return self._loop.progress

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    def job(self, prompt: Prompt, sampling: Sampling, pooling: Pooling | None = None) -> DeviceJob:
        """A request, checked."""
        tokens = self._encode(prompt)
        room = check_prompt(self.config, tokens)
        self._check_context(len(tokens))
        assert room > 0, "check_prompt leaves room for a token"
        check_tokens(sampling, self.config.vocab_size)
        if sampling.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and the engine has none; use stop_ids")
        if sampling.grammar is not None:
            check_installed()
            if self.tokenizer is None:
                raise UsageError("a grammar needs a tokenizer, and the engine has none")
        eos_ids = () if self.tokenizer is None else self.tokenizer.eos_ids
        ends = ends_of(eos_ids, sampling, self.config.vocab_size)
        stop_ids = frozenset((*ends, *sampling.stop_ids))
        return DeviceJob(with_seed(sampling), tuple(tokens), stop_ids, pooling)

    def _check_context(self, num_tokens: int) -> None:
        if num_tokens >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; max_context is {self.max_context}; give a "
                "shorter one, or raise --max-context"
            )

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise UsageError("the engine has no tokenizer: give prompts as token ids")
        return self.tokenizer.encode(prompt)

    def _submit(
        self,
        job: DeviceJob,
        sink: Sink,
        request_id: Hashable = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        salt: str = "",
    ) -> Hashable:
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        sampling, length = job.sampling, len(job.prompt)
        now = time.monotonic()
        ask = Ask(
            request_id,
            job.prompt,
            max_tokens=min(sampling.max_tokens, self.max_context - length)
            if job.makes_tokens
            else 0,
            min_tokens=sampling.min_tokens,
            num_samples=sampling.num_samples,
            stop_ids=job.stop_ids,
            priority=priority,
            arrival=now,
            deadline=None if timeout_s is None else now + timeout_s,
            salt=f"{rope_regime(self.config, length)}/{salt}",
            needs_host=sampling.grammar is not None,
            reuse_prefix=job.first_computed is None or job.first_computed > 0,
            reuse_limit=None if job.first_computed is None else job.first_computed + 1,
        )
        self._loop.submit(ask, LiveRequest(request_id, job, self.tokenizer, sink))
        return request_id

    def _run_all(self, jobs: list[DeviceJob], progress: Progress | None = None) -> list[Output]:
        outputs: dict[Hashable, Output] = {}

        def sink(event: Event) -> None:
            if isinstance(event, Output):
                outputs[event.request_id] = event
                if progress is not None:
                    progress("requests", len(outputs), len(jobs))

        request_ids = [self._submit(job, sink) for job in jobs]
        try:
            while len(outputs) < len(jobs):
                self._loop.advance()
        finally:  # interrupted: nothing of it stays behind
            for request_id in request_ids:
                self._loop.cancel(request_id)
        return [outputs[request_id] for request_id in request_ids]


def scheduler_config(
    configs: Sequence[ModelConfig], recipe: Recipe, num_pages: int, ahead_of_drafts: bool = False
) -> SchedulerConfig:
    """For the models that share the pages."""
    limits = recipe.limits.filled()
    return SchedulerConfig(
        num_pages=num_pages,
        page_size=recipe.kv.page_size,
        token_budget=limits.token_budget,
        max_batch=limits.max_batch,
        window=widest_window(configs),
        prefix_cache=recipe.kv.prefix_cache,
        ahead_of_drafts=ahead_of_drafts,
    )


def widest_window(configs: Sequence[ModelConfig]) -> int | None:
    """How many tokens the layer that sees furthest sees; None when one sees all."""
    windows = [layer.window for config in configs for layer in config.layers]
    return None if None in windows else max(window for window in windows if window is not None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text, or the ids of one prompt, stand for a list of it."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _for_each(sampling: Sampling | Sequence[Sampling] | None, num: int) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * num
    if len(sampling) != num:
        raise UsageError(f"{len(sampling)} samplings for {num} prompts; give one, or one for each")
    return list(sampling)
