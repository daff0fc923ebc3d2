"""The plain loop: one request, one contiguous cache, attention and sampling by their references.
The truth the engine is tested against.

    tokens = list(generate_tokens(model, prompt_ids, Sampling(max_tokens=64)))
    outputs = generate_samples(model, prompt_ids, Sampling(n=2, best_of=4, temperature=1.0))
    print(reference_generate(model, tokenizer, prompt_ids, Sampling(temperature=0.7)).text)

Letters: S tokens in the cache, T tokens of a step, K key-value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.engine.requests.request import FinishReason, Sampling
from ridgeline.engine.requests.thinking import stop_watcher
from ridgeline.engine.sampling.choosing import (
    Chooser,
    Chosen,
    TokenLogprob,
    best_samples,
    check_tokens,
    ends_of,
    logprobs_of,
    with_seed,
)
from ridgeline.engine.sampling.live import decoder_for
from ridgeline.engine.sampling.matching import Grammars
from ridgeline.engine.sampling.thinking import AnyMatcher, matcher_for
from ridgeline.errors import ContextLengthError, OutOfMemoryError, UsageError
from ridgeline.formats.dtypes import dtype_bytes
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels.attention import AttentionSpec, attention
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.cost import kv_bytes_per_token

CHUNK = 512  # prompt tokens a step: bounds the scores held at once to 512 rows


class OneSequence:
    """One sequence's keys and values, contiguous, and the `Sequences` the model asks for."""

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        config = model.config
        weight = model.embed.weight
        shape = (config.num_layers, max_tokens, config.num_kv_heads, config.head_dim)
        self.keys_LSKH = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.values_LSKH = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.length = 0  # tokens in the cache before this step
        self.positions_T = torch.empty(0, dtype=torch.int64, device=weight.device)
        self.lengths_T = self.positions_T

    def begin(self, num_tokens: int, prompt_length: int) -> None:
        """The next step brings this many tokens."""
        device = self.positions_T.device
        self.positions_T = torch.arange(self.length, self.length + num_tokens, device=device)
        self.lengths_T = (self.positions_T + 1).clamp(min=prompt_length)

    def end(self) -> None:
        self.length += len(self.positions_T)

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        end = self.length + len(self.positions_T)
        self.keys_LSKH[layer, self.length : end] = k_TKH
        self.values_LSKH[layer, self.length : end] = v_TKH
        return attention(
            q_TNH, self.keys_LSKH[layer, :end], self.values_LSKH[layer, :end], self.length, spec
        )


def forward(
    model: Transformer, tokens: Sequence[int], cache: OneSequence, prompt_length: int
) -> Tensor:
    """Run tokens through the model after those in the cache; the last one's logits [V]."""
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=cache.positions_T.device)
    cache.begin(len(tokens), prompt_length)
    hidden_TD = model(tokens_T, cache)
    cache.end()
    return model.logits(hidden_TD[-1:])[0]


@torch.inference_mode()
def generate_chosen(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    sample: int = 0,
    matcher: AnyMatcher | None = None,
) -> Iterator[Chosen]:
    """The tokens of one output one by one; ends after `max_tokens`, at the context's end, after
    (and with) a stop id, of those given and of the sampling's own, or when its grammar, which
    `matcher` follows, is complete.
    """
    room = check_prompt(model.config, prompt)
    vocab_size = model.config.vocab_size
    check_tokens(sampling, vocab_size)
    num_new = min(sampling.max_tokens, room)
    check_memory(model.config, model.embed.weight, len(prompt) + num_new)
    cache = OneSequence(model, len(prompt) + num_new)
    stops = {*stop_ids, *sampling.stop_ids}
    device = cache.positions_T.device
    chooser = Chooser(with_seed(sampling), prompt, vocab_size, stops, device, sample, matcher)
    for start in range(0, len(prompt), CHUNK):
        logits_V = forward(model, prompt[start : start + CHUNK], cache, len(prompt))
    for count in range(num_new):
        chosen = chooser.choose(logits_V)
        yield chosen
        if chosen.token in stops or chooser.is_complete or count + 1 == num_new:
            return
        logits_V = forward(model, [chosen.token], cache, len(prompt))


def generate_tokens(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    sample: int = 0,
    matcher: AnyMatcher | None = None,
) -> Iterator[int]:
    """The token ids of one of the request's outputs, one by one."""
    chosen = generate_chosen(model, prompt, sampling, stop_ids, sample, matcher)
    return (entry.token for entry in chosen)


def generate_samples(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    grammars: Grammars | None = None,
) -> list[list[Chosen]]:
    """All `n` outputs; with `best_of` the best ones first, else in the order of their seeds."""
    sampling = with_seed(sampling)
    outputs = [
        list(
            generate_chosen(
                model, prompt, sampling, stop_ids, sample, _matcher(grammars, sampling, stop_ids)
            )
        )
        for sample in range(sampling.num_samples)
    ]
    if sampling.num_samples == sampling.n:
        return outputs
    logprobs = [[chosen.logprob for chosen in output if chosen.logprob] for output in outputs]
    return [outputs[index] for index in best_samples(logprobs, sampling.n)]


@torch.inference_mode()
def prompt_logprobs(
    model: Transformer, prompt: Sequence[int], num_top: int = 0
) -> list[TokenLogprob | None]:
    """The log-probability of each token of a prompt after those before it; the first has none."""
    check_prompt(model.config, prompt)
    cache = OneSequence(model, len(prompt))
    logprobs: list[TokenLogprob | None] = [None]
    tokens_T = torch.tensor(prompt, dtype=torch.int64, device=cache.positions_T.device)
    for start in range(0, len(prompt) - 1, CHUNK):
        part_T = tokens_T[start : min(start + CHUNK, len(prompt) - 1)]
        cache.begin(len(part_T), len(prompt))
        logits_TV = model.logits(model(part_T, cache))
        cache.end()
        logprobs += logprobs_of(logits_TV, tokens_T[start + 1 : start + 1 + len(part_T)], num_top)
    return logprobs


def check_prompt(config: ModelConfig, prompt: Sequence[int]) -> int:
    """How many tokens still fit behind the prompt; an error when it is empty, too long or not of
    this vocabulary.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    limit = config.max_context
    if len(prompt) >= limit:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the model's context of {limit} leaves no room; "
            "give a shorter one"
        )
    wrong = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise UsageError(
            f"token id {wrong} of the prompt is not in the model's vocabulary of "
            f"{config.vocab_size}; use the tokenizer that belongs to the model"
        )
    return limit - len(prompt)


def check_memory(config: ModelConfig, like: Tensor, num_tokens: int) -> None:
    """An error before a cache of `like`'s dtype, where that lies, is allocated and cannot fit."""
    needed = kv_bytes_per_token(config, dtype_bytes(like.dtype)) * num_tokens
    free = available_memory(str(like.device))
    if needed > free:
        raise OutOfMemoryError(
            f"keys and values of {num_tokens} tokens need {needed / 2**30:.1f} GiB; "
            f"{free / 2**30:.1f} GiB are free on {like.device}; give a smaller --max-tokens"
        )


@dataclass(frozen=True)
class Generation:
    """What came of a request."""

    text: str
    tokens: tuple[int, ...]  # the stop token included
    finish_reason: FinishReason
    num_prompt_tokens: int
    seed: int  # repeats the draw
    prefill_s: float  # from the start to the first token
    decode_s: float  # from the first token to the last

    def __str__(self) -> str:
        return self.text

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None when there was no second token to time."""
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else None


def reference_generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Text from a prompt (text, or token ids such as `tokenizer.chat` makes): one output. `on_text`
    sees pieces as they come.
    """
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    sampling = with_seed(sampling or Sampling())
    _check_plain(sampling)
    eos_ids = ends_of(tokenizer.eos_ids, sampling, model.config.vocab_size)
    matcher = _matcher(Grammars(tokenizer, model.config.vocab_size), sampling, eos_ids)
    decoder = decoder_for(sampling, tokenizer)
    watcher = stop_watcher(sampling.stop, sampling.thinking)
    pieces: list[str] = []

    def emit(text: str) -> None:
        if text:
            pieces.append(text)
            if on_text is not None:
                on_text(text)

    tokens: list[int] = []
    reason: FinishReason = "length"
    start = first = time.perf_counter()
    for token in generate_tokens(model, prompt_ids, sampling, eos_ids, matcher=matcher):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if token in eos_ids or token in sampling.stop_ids:
            reason = "stop"
            break
        emit(watcher.push(decoder.push(token)))
        if watcher.stopped or (matcher is not None and matcher.is_complete):
            reason = "stop"
            break
    last = time.perf_counter()
    emit(watcher.push(decoder.finish()))
    emit(watcher.finish())
    assert sampling.seed is not None, "with_seed gave one"
    return Generation(
        "".join(pieces),
        tuple(tokens),
        reason,
        len(prompt_ids),
        sampling.seed,
        first - start,
        last - first,
    )


def _matcher(
    grammars: Grammars | None, sampling: Sampling, stop_ids: Collection[int]
) -> AnyMatcher | None:
    """What follows one output's grammar and the limit to its thinking, if it has one."""
    if not sampling.is_matched or grammars is None:
        return None
    grammar = sampling.grammar
    compiled = None if grammar is None else grammars.compile_now(grammar)
    return matcher_for(grammars, compiled, sampling, {*stop_ids, *sampling.stop_ids})


def _check_plain(sampling: Sampling) -> None:
    """`reference_generate` makes one text and nothing beside it."""
    for name in ("n", "best_of", "logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value not in (None, 1) or (name.endswith("logprobs") and value is not None):
            raise UsageError(
                f"{name} is {value}; reference_generate makes one text: use Engine.generate"
            )
