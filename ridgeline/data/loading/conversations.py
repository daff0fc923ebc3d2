"""Which tokens of a conversation the assistant wrote: those alone are learned.

A template with `generation` tags says so itself. With any other, the conversation up to an
assistant's message is rendered with the generation prompt: what the whole conversation has behind
that is what the model would have had to write. It ends with the first token that ends generation,
which is learned too; what the template writes behind it (a line end) is not.

    learned_spans(tokenizer, messages)      # the text, and where in it the assistant's words are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.chat_template import BEGIN_MARK, END_MARK
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import UsageError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class LearnedSpan:
    """Characters of a conversation's text that the assistant wrote."""

    start: int
    end: int
    is_exact: bool = False  # the template marked it
    may_go_on: bool = False  # words of others may follow before `end`, behind an end token


@dataclass(frozen=True)
class ConversationText:
    text: str
    spans: tuple[LearnedSpan, ...]


def learned_spans(
    tokenizer: Tokenizer, messages: Messages, tools: Tools = None
) -> ConversationText:
    """UsageError where the conversation has no words of the assistant, holds special tokens as
    text, or is one that the template rejects.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise UsageError("no message of the assistant, so nothing to learn from")
    _check_texts(tokenizer, messages)
    whole = tokenizer.training_text(messages, tools=tools)
    if whole.generated is not None:
        if not whole.generated:
            raise UsageError("the chat template marks nothing of it as the assistant's words")
        spans = [LearnedSpan(start, end, is_exact=True) for start, end in whole.generated]
        return ConversationText(whole.text, tuple(spans))
    numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [_start(tokenizer, messages[:number], tools, whole.text) for number in numbers]
    spans = []
    for number, start, limit in zip(numbers, starts, [*starts[1:], len(whole.text)], strict=True):
        end = _end(tokenizer, messages[: number + 1], tools, whole.text)
        spans.append(LearnedSpan(start, limit if end is None else end, may_go_on=end is None))
    return ConversationText(whole.text, tuple(spans))


def _check_texts(tokenizer: Tokenizer, messages: Messages) -> None:
    """A special token in a message would end its turn; it is refused rather than believed."""
    specials = [*tokenizer.special_texts, BEGIN_MARK, END_MARK]
    beginnings = {special[0] for special in specials}  # few, and most texts have none of them
    for number, message in enumerate(messages, 1):
        for text in _texts(message):
            if any(beginning in text for beginning in beginnings):
                for special in specials:
                    if special in text:
                        raise UsageError(
                            f"message {number} has the special token {special!r} as text"
                        )
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"message {number} has half of a surrogate pair (U+D800 to U+DFFF)"
                ) from None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value
    return [text for part in parts for text in _texts(part)] if _is_nested(value) else []


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list)


def _start(tokenizer: Tokenizer, before: Messages, tools: Tools, text: str) -> int:
    """Where the answer to these messages begins in the text of the whole conversation."""
    if not before:
        raise UsageError("it begins with a message of the assistant; expected one of the user")
    prompt = tokenizer.training_text(before, tools=tools, add_generation_prompt=True).text
    if text.startswith(prompt):
        return len(prompt)
    shared = _num_shared(prompt, text)
    # Some prompts open a thought that answers do not have any more. What is shared must then reach
    # into the generation prompt: behind what it shares with the same messages without one.
    history = tokenizer.training_text(before, tools=tools).text
    if shared <= _num_shared(history, text):
        raise UsageError(
            "cannot tell the assistant's words: the chat template writes earlier messages "
            "differently when later ones follow; use one with {% generation %} tags"
        )
    return shared


def _num_shared(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = zip(first, second, strict=False)
    differing = (number for number, (one, other) in enumerate(pairs) if one != other)
    return next(differing, min(len(first), len(second)))


def _end(tokenizer: Tokenizer, messages: Messages, tools: Tools, text: str) -> int | None:
    """Where the last of these messages ends in the text of the whole conversation; None where the
    template writes it differently when others follow.
    """
    upto = tokenizer.training_text(messages, tools=tools).text
    return len(upto) if text.startswith(upto) else None


def learned_tokens(
    conversation: ConversationText,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    end_ids: Sequence[int],
) -> NDArray[np.bool_]:
    """For each token whether it is learned. One that lies across the edge of a span is not: the
    model never has to write it.
    """
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    is_end = np.isin(ids, end_ids)
    learned = np.zeros(len(ids), dtype=np.bool_)
    for span in conversation.spans:
        first, last = np.searchsorted(begins, (span.start, span.end))
        stops = np.flatnonzero(is_end[first:last])
        if len(stops) and not span.is_exact:
            last = first + stops[0] + 1
        elif span.may_go_on:
            raise UsageError("cannot tell where the assistant's words end in the chat template")
        learned[first:last] = ends[first:last] <= span.end
    if not learned.any():
        raise UsageError("no token of the assistant, so nothing to learn from")
    return learned
