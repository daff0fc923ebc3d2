"""One output told apart as it comes: what the model thought, what it answers, and its calls.

The thought comes first, without its tags and the white space at its edges; what follows is read as
call_parser.py reads it. Every reply with messages is made from these events.

    parser = OutputParser(prompt)                     # a ParsedPrompt
    for event in parser.push(delta.text): ...         # Thought, Text, CallStart, CallPart, CallEnd
    for event in parser.finish(): ...
    parser.num_thought_tokens(completion.tokens, tokenizer)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.engine.requests.thinking import Thinking, ThinkingPart, ThinkingScanner
from ridgeline.server.protocol.replies.call_parser import CallEvent, CallParser
from ridgeline.server.protocol.requests.asked import ParsedPrompt


class Thought(NamedTuple):
    """The next part of what the model thought."""

    text: str


OutputEvent = Thought | CallEvent


class OutputParser:
    """One output. Without thinking tags and tools it passes text on as it is."""

    def __init__(self, prompt: ParsedPrompt) -> None:
        self._thinking = thinking = prompt.thinking
        self._scanner = None if thinking is None else ThinkingScanner(thinking)
        self._calls = CallParser(prompt.calls)
        self._at_edge = self._has_thought = thinking is not None and thinking.is_open
        self._space = ""  # behind a thought so far: its end, if a tag follows

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def is_answer(self) -> bool:
        """Whether the thought is over, or there is none: all that comes is the answer."""
        return self._scanner is None or (self._scanner.phase == "answer" and not self._at_edge)

    @property
    def is_thought(self) -> bool:
        """Whether what comes next goes on with a thought."""
        return self._scanner is not None and self._scanner.phase == "thought"

    def push(self, text: str) -> list[OutputEvent]:
        if self._scanner is None or self.is_answer:
            return list(self._calls.push(text))
        return self._events(self._scanner.push(text))

    def finish(self) -> list[OutputEvent]:
        """Nothing more comes: what was held back is told."""
        held = [] if self._scanner is None else self._events(self._scanner.finish())
        return [*held, *self._calls.finish()]

    def num_thought_tokens(self, tokens: Sequence[int], tokenizer: Tokenizer) -> int:
        """How many of an output's tokens, all of which it was given, are the thought's."""
        if not self._has_thought or self._thinking is None or self._scanner is None:
            return 0
        if self._scanner.phase != "answer":
            return len(tokens)
        closing = tokenizer.encode(self._thinking.close_tag, add_special_tokens=False)
        if len(closing) == 1 and closing[0] in tokens:
            return tokens.index(closing[0]) + 1
        return _num_until_answer(self._thinking, tokens, tokenizer)

    def _events(self, parts: Sequence[ThinkingPart]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for kind, text in parts:
            if kind == "tag":
                self._space, self._at_edge, self._has_thought = "", True, True
                continue
            shown = text.lstrip() if self._at_edge else text
            if not shown:
                continue
            self._at_edge = False
            if kind == "thought":
                whole = self._space + shown
                told = whole.rstrip()
                self._space = whole[len(told) :]
                events += [Thought(told)] if told else []
            else:
                events += self._calls.push(shown)
        return events


def _num_until_answer(thinking: Thinking, tokens: Sequence[int], tokenizer: Tokenizer) -> int:
    scanner, decoder = ThinkingScanner(thinking), tokenizer.decoder(skip_special_tokens=False)
    for number, token in enumerate(tokens):
        if scanner.phase == "answer":
            return number
        scanner.push(decoder.push(token))
    return len(tokens)
