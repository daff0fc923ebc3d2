"""Thinking: what a model writes between two tags before it answers, `<think>…</think>`.

Only what an output begins with counts: a tag further on is text. `Thinking` goes with a request;
`ThinkingScanner` tells the parts of its output apart as they come, however the text is cut.

    scanner = ThinkingScanner(Thinking())
    scanner.push("<think>So, 2 +")     # -> [tag "<think>", thought "So, 2 +"]
    scanner.push(" 2.</th")            # -> [thought " 2."]     ("</th" may yet become the tag)
    scanner.push("ink>4")              # -> [tag "</think>", answer "4"]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.engine.requests.stop import StopWatcher, possible_start
from ridgeline.errors import UsageError

ThinkingPhase = Literal["before", "thought", "answer"]


@dataclass(frozen=True)
class Thinking:
    """How an output may think. What stop strings and a grammar ask for is asked of the answer."""

    open_tag: str = "<think>"
    close_tag: str = "</think>"
    is_open: bool = False  # the prompt ends inside: the output begins with a thought
    max_tokens: int | None = None  # of the thought; then the closing tag is forced

    def __post_init__(self) -> None:
        if not self.open_tag or not self.close_tag:
            raise UsageError("a thinking tag is empty; give two, as <think> and </think>")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"thinking's max_tokens is {self.max_tokens}; give at least 1")


class ThinkingPart(NamedTuple):
    kind: Literal["tag", "thought", "answer"]
    text: str


class ThinkingScanner:
    """One output. The parts, joined, are the text that came, but for what is held back."""

    def __init__(self, thinking: Thinking) -> None:
        self.phase: ThinkingPhase = "thought" if thinking.is_open else "before"
        self._open, self._close = thinking.open_tag, thinking.close_tag
        self._held = ""  # may be the beginning of a tag

    def push(self, text: str) -> list[ThinkingPart]:
        if self.phase == "answer":
            return [ThinkingPart("answer", text)] if text else []
        held, self._held = self._held + text, ""
        parts: list[ThinkingPart] = []
        if self.phase == "before":
            begun = held.lstrip()
            if len(begun) < len(self._open) and self._open.startswith(begun):
                self._held = held
                return []
            if not begun.startswith(self._open):
                self.phase = "answer"
                return [ThinkingPart("answer", held)]
            end = len(held) - len(begun) + len(self._open)
            parts.append(ThinkingPart("tag", held[:end]))
            held, self.phase = held[end:], "thought"
        return [*parts, *self._thought(held)]

    def finish(self) -> list[ThinkingPart]:
        """Nothing more comes: what was held back is text after all."""
        held, self._held = self._held, ""
        kind: Literal["thought", "answer"] = "thought" if self.phase == "thought" else "answer"
        return [ThinkingPart(kind, held)] if held else []

    def _thought(self, held: str) -> list[ThinkingPart]:
        thought, tag, answer = held.partition(self._close)
        if not tag:
            keep = possible_start(held, (self._close,))
            thought, self._held = held[: len(held) - keep], held[len(held) - keep :]
        else:
            self.phase = "answer"
        parts = [
            ThinkingPart("thought", thought),
            ThinkingPart("tag", tag),
            ThinkingPart("answer", answer),
        ]
        return [part for part in parts if part.text]


def stop_watcher(stops: tuple[str, ...], thinking: Thinking | None) -> StopWatcher | AnswerStops:
    """What watches an output for its stop strings."""
    return AnswerStops(stops, thinking) if stops and thinking is not None else StopWatcher(stops)


class AnswerStops:
    """Stop strings that are watched for in the answer and not in the thought, as `StopWatcher`."""

    def __init__(self, stops: tuple[str, ...], thinking: Thinking) -> None:
        self._scanner, self._watcher = ThinkingScanner(thinking), StopWatcher(stops)

    @property
    def match(self) -> str | None:
        """The stop string that ended the text."""
        return self._watcher.match

    @property
    def stopped(self) -> bool:
        return self.match is not None

    def push(self, text: str) -> str:
        return "".join(self._shown(part) for part in self._scanner.push(text))

    def finish(self) -> str:
        shown = "".join(self._shown(part) for part in self._scanner.finish())
        return shown + self._watcher.finish()

    def _shown(self, part: ThinkingPart) -> str:
        return self._watcher.push(part.text) if part.kind == "answer" else part.text
