"""The plain loop: one request, one contiguous cache, attention and sampling by their references.
The truth the engine is tested against.

    tokens = list(generate_tokens(model, prompt_ids, Sampling(max_tokens=64)))
    print(generate(model, tokenizer, prompt_ids, Sampling(temperature=0.7)).text)

Letters: S tokens in the cache, T tokens of a step, K key-value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.data import Tokenizer
from ridgeline.engine.request import FinishReason, Sampling
from ridgeline.engine.stop import StopWatcher
from ridgeline.errors import ContextLengthError, NumericsError, OutOfMemoryError, UsageError
from ridgeline.formats.dtypes import dtype_bytes
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels.attention import AttentionSpec, attention
from ridgeline.kernels.sampling import sample
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
def generate_tokens(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """New token ids one by one; ends after `max_tokens`, at the context's end, or after (and with)
    a stop id.
    """
    room = check_prompt(model.config, prompt)
    sampling = with_seed(sampling)
    num_new = min(sampling.max_tokens, room)
    check_memory(model, len(prompt) + num_new)
    cache = OneSequence(model, len(prompt) + num_new)
    for start in range(0, len(prompt), CHUNK):
        logits_V = forward(model, prompt[start : start + CHUNK], cache, len(prompt))
    for count in range(num_new):
        token = choose(logits_V, sampling, position=len(prompt) + count)
        yield token
        if token in stop_ids or count + 1 == num_new:
            return
        logits_V = forward(model, [token], cache, len(prompt))


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


def check_memory(model: Transformer, num_tokens: int) -> None:
    """An error before the cache is allocated, where it cannot fit."""
    weight = model.embed.weight
    needed = kv_bytes_per_token(model.config, dtype_bytes(weight.dtype)) * num_tokens
    free = available_memory(str(weight.device))
    if needed > free:
        raise OutOfMemoryError(
            f"keys and values of {num_tokens} tokens need {needed / 2**30:.1f} GiB; "
            f"{free / 2**30:.1f} GiB are free on {weight.device}; give a smaller --max-tokens"
        )


def with_seed(sampling: Sampling) -> Sampling:
    """The same sampling with a seed drawn where none was given."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(32))


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    assert sampling.seed is not None, "with_seed comes first"
    token = sample(
        logits_V,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=position,
    )
    if logits_V[token].isnan():  # argmax prefers NaN: when there is one, it is chosen
        raise NumericsError(
            f"the model's logits at position {position} are not numbers (NaN): its weights hold "
            "NaN, or values overflow in fp16; try --dtype fp32 or another checkpoint"
        )
    return int(token)


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

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None when there was no second token to time."""
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else None


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Text from a prompt (text, or token ids such as `tokenizer.chat` makes). `on_text` sees pieces
    as they come.
    """
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    sampling = with_seed(sampling or Sampling())
    decoder, watcher = tokenizer.decoder(), StopWatcher(sampling.stop)
    pieces: list[str] = []

    def emit(text: str) -> None:
        if text:
            pieces.append(text)
            if on_text is not None:
                on_text(text)

    tokens: list[int] = []
    reason: FinishReason = "length"
    start = first = time.perf_counter()
    for token in generate_tokens(model, prompt_ids, sampling, stop_ids=tokenizer.eos_ids):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if token in tokenizer.eos_ids:
            reason = "stop"
            break
        emit(watcher.push(decoder.push(token)))
        if watcher.stopped:
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
