"""From what a caller gives to what the engine runs: prompts, conversations and settings become
checked jobs, and a job becomes what the scheduler is asked for.

What cannot run is an error here, before anything runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.saved import Beside
from ridgeline.engine.naive import check_prompt
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.choosing import check_tokens, ends_of, with_seed
from ridgeline.engine.sampling.extras import DeviceJob, Pooling
from ridgeline.engine.sampling.matching import check_installed
from ridgeline.engine.sampling.scoring import RowScore, Scoring
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.steps.rope_tables import rope_regime
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.models import ModelConfig

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]  # messages: {"role": "user", "content": "..."}


class Terms(NamedTuple):
    """How a request is served beside others."""

    priority: int = 0  # a higher one is served first
    timeout_s: float | None = None  # it is cancelled after this long
    salt: str = ""  # requests of different salts share no prefix
    tenant: str = ""  # whose it is: grammars of different tenants are compiled in turns


NO_TERMS = Terms()


def make_job(
    prompt: Prompt,
    sampling: Sampling | None,
    pooling: Pooling | None,
    beside: Beside,
    config: ModelConfig,
    max_context: int,
) -> DeviceJob:
    """Without a `sampling` it is the model's own."""
    tokenizer = beside.tokenizer
    sampling = beside.default_sampling if sampling is None else sampling
    tokens = encode(prompt, tokenizer)
    room = check_prompt(config, tokens)
    check_context(len(tokens), max_context)
    assert room > 0, "check_prompt leaves room for a token"
    check_tokens(sampling, config.vocab_size)
    if sampling.stop and tokenizer is None:
        raise UsageError("stop strings need a tokenizer, and the engine has none; use stop_ids")
    if sampling.grammar is not None:
        check_installed()
        if tokenizer is None:
            raise UsageError("a grammar needs a tokenizer, and the engine has none")
    if sampling.thinking is not None and tokenizer is None:
        raise UsageError("thinking tags need a tokenizer, and the engine has none")
    ends = ends_of(beside.eos_ids, sampling, config.vocab_size)
    stop_ids = frozenset((*ends, *sampling.stop_ids))
    return DeviceJob(with_seed(sampling), tuple(tokens), stop_ids, pooling)


def scoring_job(
    tokens: Sequence[int], score: RowScore, first: int, config: ModelConfig, max_context: int
) -> tuple[DeviceJob, Scoring]:
    """Nothing follows the prompt, so that it may fill the context."""
    if not 1 <= first < len(tokens):
        raise UsageError(
            f"{len(tokens)} tokens are to be scored from number {first} on; each needs one "
            "before it; give at least two tokens, and a first one below their number"
        )
    check_prompt(config, tokens[-1:])
    check_prompt(config, tokens[:-1])
    check_context(len(tokens) - 1, max_context)
    scoring = Scoring(score, first, len(tokens))
    sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=0)
    job = DeviceJob(sampling, tuple(tokens), frozenset(), scoring=scoring, first_scored=first)
    return job, scoring


def make_ask(
    job: DeviceJob, request_id: Hashable, terms: Terms, config: ModelConfig, max_context: int
) -> Ask:
    """What the scheduler knows of a job."""
    sampling, length = job.sampling, len(job.prompt)
    now = time.monotonic()
    most = min(sampling.max_tokens, max_context - length) if job.makes_tokens else 0
    return Ask(
        request_id,
        job.prompt,
        max_tokens=most,
        min_tokens=sampling.min_tokens,
        num_samples=sampling.num_samples,
        stop_ids=job.stop_ids,
        priority=terms.priority,
        arrival=now,
        deadline=None if terms.timeout_s is None else now + terms.timeout_s,
        salt=f"{rope_regime(config, length)}/{terms.salt}",
        tenant=terms.tenant,
        needs_host=sampling.is_matched,
        reuse_prefix=job.first_computed is None or job.first_computed > 0,
        reuse_limit=None if job.first_computed is None else job.first_computed + 1,
    )


def check_context(num_tokens: int, max_context: int) -> None:
    if num_tokens >= max_context:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens; max_context is {max_context}; give a "
            "shorter one, or raise --max-context"
        )


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise UsageError("the engine has no tokenizer: give prompts as token ids")
    return tokenizer.encode(prompt)


def chat_prompt(
    messages: Conversation,
    tokenizer: Tokenizer | None,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> list[int]:
    """A conversation as the model's chat template writes it."""
    if tokenizer is None:
        raise UsageError("the engine has no tokenizer: give prompts as token ids to generate")
    return tokenizer.chat(messages, tools=tools, **(variables or {}))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text, or the ids of one prompt, stand for a list of it."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(
    messages: Conversation | Sequence[Conversation],
) -> Sequence[Conversation]:
    """The messages of one conversation stand for a list of it."""
    if isinstance(messages, (str, Mapping)) or not messages:
        raise UsageError('chat takes messages: [{"role": "user", "content": "..."}]')
    is_one = isinstance(messages[0], Mapping)
    return [messages] if is_one else messages  # type: ignore[list-item, return-value]


def for_each(sampling: Sampling | Sequence[Sampling] | None, num: int) -> Sequence[Sampling | None]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling] * num
    if len(sampling) != num:
        raise UsageError(f"{len(sampling)} samplings for {num} prompts; give one, or one for each")
    return list(sampling)
