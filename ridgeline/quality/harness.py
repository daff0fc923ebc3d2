"""What lm-evaluation-harness asks of a model, answered by an engine: log-likelihoods of
continuations, of whole texts in windows, and generated text. cli/harness.py is the model that the
harness sees; nothing here needs the harness.

    answers = HarnessAnswers(Engine("demo"))
    answers.likelihoods([("The sky is", " blue")])      # [(log-likelihood, greedy would say it)]

Texts are tokenized as the harness's own `hf` model does: context and continuation as one text,
spaces between them with the continuation, too long ones cut on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.errors import ContextLengthError, UsageError, near_matches
from ridgeline.progress import Progress
from ridgeline.quality.perplexity import check_numbers, chosen_logprobs
from ridgeline.quality.tasks.choices import with_ending
from ridgeline.quality.tasks.generation import continued
from ridgeline.quality.tasks.score import tokenizer_for

MAX_TOKENS = 256  # of a generated text, where a task names no number
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
NEUTRAL = {"num_beams": (1,), "use_cache": (True, False), "num_return_sequences": (1,)}
KNOWN = ("until", "do_sample", *LENGTH_NAMES, *NUMBERS, *NEUTRAL)


class HarnessAnswers:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = tokenizer_for(engine)

    @property
    def prefix_id(self) -> int:
        """What stands before a text that has nothing before it."""
        if self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        if not self.tokenizer.eos_ids:
            raise UsageError("the model has neither a BOS nor an EOS token to begin a text with")
        return self.tokenizer.eos_ids[0]

    def likelihoods(
        self, pairs: Sequence[tuple[str, str]], progress: Progress | None = None
    ) -> list[tuple[float, bool]]:
        """For each context and continuation: the continuation's log-likelihood, and whether greedy
        decoding would write it.
        """
        return self._scored([self._pair(*pair) for pair in pairs], progress)

    def text_likelihoods(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> list[float]:
        """The log-likelihood of each text, however long: every token once, with as much before it
        as the windows have.
        """
        windows = [list(self._windows(text)) for text in texts]
        scores = iter(self._scored([each for few in windows for each in few], progress))
        return [sum(next(scores)[0] for _ in few) for few in windows]

    def completions(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], progress: Progress | None = None
    ) -> list[str]:
        """For each context and generation_kwargs: what follows, up to the first stop string."""
        prompts, samplings = [], []
        for context, options in requests:
            sampling = sampling_of(options)
            room = self.engine.max_context - sampling.max_tokens
            if room < 1:
                raise ContextLengthError(
                    f"{sampling.max_tokens} tokens are to be generated, and the context is "
                    f"{self.engine.max_context}; set max_gen_toks lower"
                )
            prompts.append((self.tokenizer.encode(context) or [self.prefix_id])[-room:])
            samplings.append(sampling)
        texts = []
        outputs = self.engine.generate(prompts, samplings, progress=progress)
        for output, sampling in zip(outputs, samplings, strict=True):
            output.raise_unless_finished()
            texts.append(continued(self.tokenizer, output.tokens, sampling.stop))
        return texts

    def _scored(
        self, prompts: Sequence[tuple[list[int], int]], progress: Progress | None
    ) -> list[tuple[float, bool]]:
        if not prompts:
            return []
        tokens, firsts = [each for each, _ in prompts], [first for _, first in prompts]
        scores = self.engine.score(tokens, chosen_and_greedy, firsts, progress)
        check_numbers(scores)
        return [(float(rows[:, 0].double().sum()), bool(rows[:, 1].all())) for rows in scores]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        if context.strip():
            tokens, first = with_ending(self.tokenizer, context, continuation)
        else:
            tokens, first = self._begun(context + continuation), 1
        extra = max(0, len(tokens) - self.engine.max_context)
        if first <= extra or len(tokens) < 2:
            raise ContextLengthError(
                f"a continuation of {len(tokens) - first} tokens cannot be scored; the context is "
                f"{self.engine.max_context}"
            )
        return tokens[extra:], first - extra

    def _begun(self, text: str) -> list[int]:
        """Tokens of a text, with one before them."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens if tokens[:1] == [self.prefix_id] else [self.prefix_id, *tokens]

    def _windows(self, text: str) -> Iterator[tuple[list[int], int]]:
        tokens, length = self._begun(text), self.engine.max_context - 1  # one is before the scored
        for first in range(1, len(tokens), length):
            end = min(first + length, len(tokens))
            start = max(0, end - 1 - length)
            yield tokens[start:end], first - start


def chosen_and_greedy(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """Each token's log-probability, and 1 where it is the likeliest [R, 2]: a RowScore."""
    chosen_R1 = chosen_logprobs(first, logits_RV, tokens_R)
    greedy_R1 = (logits_RV.argmax(1) == tokens_R)[:, None]
    return torch.cat([chosen_R1, greedy_R1.to(chosen_R1.dtype)], dim=1)


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """A task's generation_kwargs as the engine's sampling."""
    for name, value in options.items():
        if name not in KNOWN:
            hint = near_matches(name, KNOWN)
            raise UsageError(f"generation_kwargs has {name!r}, which is unknown{hint}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise UsageError(f"generation_kwargs has {name}={value}; only 1 is possible")
    given: dict[str, Any] = {
        name: kind(options[name]) for name, kind in NUMBERS.items() if options.get(name) is not None
    }
    if options.get("do_sample") is False:
        given["temperature"] = 0.0
    elif options.get("do_sample"):
        given.setdefault("temperature", 1.0)
    lengths = [options[name] for name in LENGTH_NAMES if options.get(name) is not None]
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    return Sampling(max_tokens=int(lengths[0]) if lengths else MAX_TOKENS, stop=stop, **given)
