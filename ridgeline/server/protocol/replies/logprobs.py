"""Log-probabilities in the forms of the chat, completions and responses routes.

Every token of an output has an entry, its stop token included, so that there are as many entries as
completion tokens. What has no finite logarithm is told as -9999.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ridgeline.data import Tokenizer
from ridgeline.engine.sampling.choosing import TokenLogprob

SMALLEST = -9999.0


class TokenTexts:
    """What tokens stand for, special ones by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._tokenizer.token_bytes(token)
            found = found or self._tokenizer.decode([token], skip_special_tokens=False).encode()
            self._known[token] = found
        return found

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def entries(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """For the chat and responses routes."""
        return [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(*top) for top in entry.top],
            }
            for entry in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.bytes_of(token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(piece),
        }


class Columns:
    """For the completions route: lists side by side, with the place of each token in the text.
    Offsets go on from one call to the next.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = tokenizer.decoder()
        self._offset = 0

    def of(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The first token of a prompt has no logprob."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token))
        return {
            "tokens": [self._texts.text_of(token) for token in tokens],
            "token_logprobs": [entry and finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [entry and self._tops(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _tops(self, entry: TokenLogprob) -> dict[str, float]:
        """By their texts: where two tokens look the same, the likelier one."""
        tops: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            tops.setdefault(self._texts.text_of(token), finite(logprob))
        return tops


def finite(logprob: float) -> float:
    return max(logprob, SMALLEST)
