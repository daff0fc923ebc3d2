"""The engine: many requests through one model at once.

Owns what a user calls; jobs.py checks requests. Who runs the steps is a backend (backend.py): the
main loop in this process, a process that is started again when it dies, or several of those. One
thread at a time: nothing in it is locked.

    engine = Engine("demo")
    for output in engine.generate(["The sky is", "Water is"], Sampling(max_tokens=32)):
        print(output.text)
    for delta in engine.stream("Once upon a time", Sampling(temperature=0.8)):
        print(delta.text, end="", flush=True)
    print(engine.chat([{"role": "user", "content": "Why is the sky blue?"}])[0])

    request_id = engine.add(prompt, sampling)       # or by hand, for a server
    while engine.has_work:
        for event in engine.step(): ...

    with Engine("demo", Recipe(parallel=Parallel(tensor=3))) as engine: ...     # local/ranks.py
    with Engine.supervised("demo") as engine: ...                   # process/supervisor.py
    with Engine.replicated("demo", num_replicas=2) as engine: ...   # replicas/pool.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.data.generation_config import GenerationConfig
from ridgeline.engine.backend import Backend, EngineProgress
from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.execution.work import CostBase
from ridgeline.engine.jobs import (
    NO_TERMS,
    Conversation,
    Prompt,
    Terms,
    as_conversations,
    as_prompts,
    chat_prompt,
    for_each,
    make_ask,
    make_job,
    scoring_job,
)
from ridgeline.engine.loading.loading import GivenModel
from ridgeline.engine.loading.saved import Beside, generation_of
from ridgeline.engine.local.local_backend import LocalBackend, as_local
from ridgeline.engine.process.supervisor import start_supervised
from ridgeline.engine.process.worker import EarlyStart, Setup
from ridgeline.engine.replicas.starting import start_replicas
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob, Pooling
from ridgeline.engine.sampling.live import LiveRequest, Sink
from ridgeline.engine.sampling.outputs import Delta, Event, Output
from ridgeline.engine.sampling.scoring import RowScore
from ridgeline.engine.scheduling.scheduler import Scheduler
from ridgeline.engine.scheduling.state import Stats
from ridgeline.errors import RidgelineError, answers_wrong_options
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import Progress, shown
from ridgeline.quantization.choose import LayerChoice
from ridgeline.recipe import KV, Limits, Parallel, Recipe, Speculation

PARTS = (Recipe, KV, Limits, Speculation, Parallel)  # whose options are not the engine's own


@answers_wrong_options(*PARTS)
class Engine:
    """`Engine(...)` runs its steps in this process; `Engine.supervised` and `Engine.replicated` run
    them in others. What needs the model itself (`score`, `forget_prefixes`, `model`, `runner`,
    `scheduler`, `choices`) is an UnsupportedError where that is in another process.
    """

    def __init__(
        self,
        model: GivenModel,
        recipe: Recipe | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        num_pages: int | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        """`num_pages` takes fewer pages of KV cache than the memory plan allows. `progress` is a
        callable (progress.py), or True for bars while the model is fetched and loaded.
        """
        with shown(progress) as report:
            if isinstance(model, str):
                model = resolve_model(model, progress=report)
            local = LocalBackend(
                model,
                recipe,
                tokenizer=tokenizer,
                device=device,
                num_pages=num_pages,
                progress=report,
            )
        generation = generation_of(model) if isinstance(model, Path) else GenerationConfig()
        self._begin(local, Beside(local.tokenizer, generation))

    @classmethod
    @answers_wrong_options(*PARTS)
    def supervised(
        cls,
        model: str | Path,
        recipe: Recipe | None = None,
        *,
        device: str = "auto",
        num_pages: int | None = None,
        progress: Progress | bool | None = None,
        setup: Setup | None = None,
        early: EarlyStart | None = None,
    ) -> Self:
        """The model in another process, which is started again when it dies; requests go on. A
        script that makes one does so under `if __name__ == "__main__":`, because the new process
        imports it. `setup`, a function of a module, is called there whenever one has started.
        `early` gives processes that wait for what to load (cli/early.py).
        """
        with shown(progress) as report:
            backend, beside = start_supervised(
                model,
                recipe,
                device=device,
                num_pages=num_pages,
                progress=report,
                setup=setup,
                early=early,
            )
        return cls.over(backend, beside)

    @classmethod
    @answers_wrong_options(*PARTS)
    def replicated(
        cls,
        model: str | Path,
        recipe: Recipe | None = None,
        *,
        num_replicas: int,
        device: str = "auto",
        num_pages: int | None = None,
        progress: Progress | bool | None = None,
        setup: Setup | None = None,
    ) -> Self:
        """Several of them, placed by Ray on this machine or a cluster, behind one interface. A
        model that is a path must be at the same place on every machine.
        """
        with shown(progress) as report:
            backend, beside = start_replicas(
                model,
                recipe,
                num_replicas=num_replicas,
                device=device,
                num_pages=num_pages,
                progress=report,
                setup=setup,
            )
        return cls.over(backend, beside)

    @classmethod
    def over(cls, backend: Backend, beside: Beside) -> Self:
        """An engine over a backend that is there already."""
        engine = cls.__new__(cls)
        engine._begin(backend, beside)
        return engine

    def _begin(self, backend: Backend, beside: Beside) -> None:
        self.tokenizer, self.generation = beside
        self.config, self.recipe, self.memory_plan = backend.wait_until_ready()
        self.max_context = self.recipe.limits.filled().max_context
        self._backend = backend
        self._events: list[Event] = []  # of requests that were added by hand
        self._numbers = count()

    def close(self) -> None:
        """End its ranks or its process, if it has any; their requests are cancelled."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @answers_wrong_options(Sampling)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: Progress | bool | None = None,
    ) -> list[Output]:
        """The outputs of all prompts, in their order; `sampling` is one for all or one for each,
        and without one the model's own (generation_config.json). What cannot run at all is an
        error before anything runs; what goes wrong later is in its output's status.
        """
        all_prompts = as_prompts(prompts)
        samplings = for_each(sampling, len(all_prompts))
        jobs = [self.job(prompt, each) for prompt, each in zip(all_prompts, samplings, strict=True)]
        with shown(progress) as report:
            return self._run_all(jobs, report)

    @answers_wrong_options(Sampling)
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        progress: Progress | bool | None = None,
    ) -> list[Output]:
        """The answers to one conversation or to several, in their order. The model's own chat
        template writes each; it also sees `tools` and `template_variables` (`enable_thinking` of
        some models).
        """
        prompts = [
            chat_prompt(conversation, self.tokenizer, tools, template_variables)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling, progress=progress)

    @answers_wrong_options(Sampling)
    def stream_chat(
        self,
        messages: Conversation,
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Iterator[Delta]:
        """The answer to a conversation piece by piece."""
        prompt = chat_prompt(messages, self.tokenizer, tools, template_variables)
        return self.stream(prompt, sampling)

    @answers_wrong_options(Sampling)
    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Delta]:
        """One prompt's output piece by piece. An end other than by stop or length is an error."""
        events: deque[Event] = deque()
        request_id = self._submit(self.job(prompt, sampling), events.append)
        try:
            while True:
                while events:
                    event = events.popleft()
                    if isinstance(event, Output):
                        event.raise_unless_finished()
                        return
                    yield event
                self._backend.advance()
        finally:
            self.cancel(request_id)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last") -> Tensor:
        """Embeddings of unit length [prompts, hidden size], fp32: of the last token's hidden
        state, or of the mean of all.
        """
        nothing = Sampling(max_tokens=1)
        jobs = [self.job(prompt, nothing, pooling) for prompt in as_prompts(prompts)]
        embeddings = []
        for output in self._run_all(jobs):
            output.raise_unless_finished()
            assert output.embedding is not None, "a finished embedding is there"
            embeddings.append(output.embedding)
        return torch.stack(embeddings)

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
        as_local(self._backend)
        num = len(prompts)
        functions = [scores] * num if callable(scores) else list(scores)
        firsts = [first] * num if isinstance(first, int) else list(first)
        jobs = [
            scoring_job(tokens, score, start, self.config, self.max_context)
            for tokens, score, start in zip(prompts, functions, firsts, strict=True)
        ]
        for output in self._run_all([job for job, _ in jobs], progress):
            output.raise_unless_finished()
        return [scoring.scores_TC for _, scoring in jobs]

    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        request_id: Hashable = None,
        priority: int = 0,
        timeout_s: float | None = None,
        salt: str = "",
        tenant: str = "",
        pooling: Pooling | None = None,
    ) -> Hashable:
        """Take a request; its events come from `step`. `salt` keeps tenants' prefixes apart, and
        grammars of several `tenant`s take turns; with `pooling` it is a prompt to embed.
        """
        job, terms = self.job(prompt, sampling, pooling), Terms(priority, timeout_s, salt, tenant)
        return self._submit(job, self._events.append, request_id, terms)

    def step(self) -> list[Event]:
        """One step of everything; what it brought for requests that were added by hand."""
        self._backend.advance()
        events, self._events[:] = list(self._events), []
        return events

    def cancel(self, request_id: Hashable) -> bool:
        """End a request now; False if it has ended already."""
        return self._backend.cancel(request_id)

    # How it is getting on.

    @property
    def has_work(self) -> bool:
        return self._backend.has_work

    @property
    def progress(self) -> EngineProgress:
        return self._backend.progress

    @property
    def stats(self) -> Stats:
        """Of the process that runs now."""
        return self._backend.stats

    @property
    def costs(self) -> CostBase | None:
        """What a step's work costs on its device; None where that is not known."""
        return self._backend.costs

    # Its processes; in this process there is one that is always up.

    @property
    def num_replicas(self) -> int:
        """Engines behind this one."""
        return self._backend.num_replicas

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first."""
        return self._backend.num_restarts

    @property
    def is_up(self) -> bool:
        """Whether a process is there that takes requests; until then they wait."""
        return self._backend.is_up

    @property
    def broken(self) -> RidgelineError | None:
        """Why nothing is tried any more, where processes died in a row. `revive` tries again."""
        return self._backend.broken

    def wait(self, others: Sequence[int], seconds: float) -> None:
        """Until there is something for `step` to do, or one of these file descriptors can be
        read: for a caller who waits for other things too (see `be_patient`).
        """
        self._backend.wait(others, seconds)

    def be_patient(self, seconds: float) -> None:
        """How long `step` waits for news of another process at most."""
        self._backend.patience_s = seconds

    def restart(self) -> None:
        """Give up on a process that is stuck, as `progress` tells: requests go on in another."""
        self._backend.restart()

    def revive(self) -> None:
        """Start a process again after all that were tried had died."""
        self._backend.revive()

    # The model itself.

    @property
    def local(self) -> LocalBackend:
        """The backend in this process; an error where the model is in another."""
        return as_local(self._backend)

    @property
    def model(self) -> Transformer:
        return self.local.model

    @property
    def runner(self) -> Runner:
        return self.local.runner

    @property
    def scheduler(self) -> Scheduler:
        return self.local.scheduler

    @property
    def choices(self) -> Sequence[LayerChoice]:
        """Layers that stayed plain, or did not, for their speed."""
        return self.local.choices

    @property
    def ranks_a_device(self) -> int:
        return self.local.ranks_a_device

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: no prompt that comes now finds its beginning computed."""
        self.local.forget_prefixes()

    # Requests on their way to the backend.

    def job(
        self, prompt: Prompt, sampling: Sampling | None, pooling: Pooling | None = None
    ) -> DeviceJob:
        """A request, checked."""
        beside = Beside(self.tokenizer, self.generation)
        return make_job(prompt, sampling, pooling, beside, self.config, self.max_context)

    def _submit(
        self, job: DeviceJob, sink: Sink, request_id: Hashable = None, terms: Terms = NO_TERMS
    ) -> Hashable:
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        ask = make_ask(job, request_id, terms, self.config, self.max_context)
        self._backend.submit(ask, LiveRequest(request_id, job, self.tokenizer, sink))
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
                self._backend.advance()
        finally:  # interrupted: nothing of it stays behind
            for request_id in request_ids:
                self._backend.cancel(request_id)
        return [outputs[request_id] for request_id in request_ids]
