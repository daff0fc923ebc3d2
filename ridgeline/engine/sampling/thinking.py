"""Thinking at work: its limit is kept by allowing nothing but the closing tag, and a grammar is
followed from there on.

`ThinkingMatcher` follows one output, as a `Matcher` does and in its place. While the output thinks
every token may come (with a grammar: none that ends it), and None stands for that mask.

    matcher = ThinkingMatcher(sampling.thinking, tokenizer, vocab_size, stop_ids, inner=None)
    matcher.mask()          # None, or [W] int32, bit i of word w is token 32 w + i
    matcher.accept(token)   # then matcher.is_complete
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ridgeline.data import Tokenizer
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.requests.thinking import Thinking, ThinkingPhase, ThinkingScanner
from ridgeline.engine.sampling.matching import BITS, CompiledGrammar, Grammars, Matcher, bits_of
from ridgeline.errors import GrammarError


class ThinkingMatcher:
    """`inner` is what follows the grammar of the answer, where it has one. Before that grammar
    there is room for a thought if one token opens it: of several, the first may begin the answer.
    """

    def __init__(
        self,
        thinking: Thinking,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Collection[int],
        inner: Matcher | None,
    ) -> None:
        self._thinking, self._tokenizer, self._inner = thinking, tokenizer, inner
        self._num_words = -(-vocab_size // BITS)
        self._scanner = ThinkingScanner(thinking)
        opening = tokenizer.encode(thinking.open_tag, add_special_tokens=False)
        self._opening = opening if len(opening) == 1 else []
        self._closing = tokenizer.encode(thinking.close_tag, add_special_tokens=False)
        self._forced: list[int] = []  # tokens of the closing tag that are still to come
        self._not_stops = ~bits_of(stop_ids, self._num_words)
        self._num_thought = 0  # tokens of the thought so far
        self._is_answering = False  # the grammar has been entered
        self.count = 0  # tokens so far

    @property
    def phase(self) -> ThinkingPhase:
        return "answer" if self._is_answering else self._scanner.phase

    def mask(self) -> np.ndarray | None:
        """The tokens that may come next; None for all of them."""
        if self._forced:
            return bits_of(self._forced[:1], self._num_words)
        if self._inner is None:
            return None
        if self.phase == "thought":
            return self._not_stops
        if self.phase == "before":
            return self._inner.mask() | bits_of(self._opening, self._num_words)
        return self._inner.mask()

    def accept(self, token: int) -> None:
        """The next token; a GrammarError if it may not be."""
        if self.phase == "before" and self._inner is not None:
            self._is_answering = token not in self._opening
        if self.phase == "answer":
            if self._inner is not None:
                self._inner.accept(token)
        else:
            self._think(token)
        self.count += 1

    def _think(self, token: int) -> None:
        mask = self.mask()
        if mask is not None and not int(mask[token // BITS]) >> token % BITS & 1:
            raise GrammarError(f"a thought may not have token {token} at position {self.count}")
        was_thought = self.phase == "thought"
        self._scanner.push(self._tokenizer.decode([token], skip_special_tokens=False))
        if self._forced:
            del self._forced[0]
        elif was_thought and self.phase == "thought":
            self._num_thought += 1
            if self._num_thought == self._thinking.max_tokens:
                self._forced = list(self._closing)

    def follow(self, tokens: Sequence[int]) -> None:
        """Come to where these tokens lead: they begin with those that were accepted."""
        for token in tokens[self.count :]:
            self.accept(token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing can be added."""
        return self._inner is not None and self.phase != "thought" and self._inner.is_complete

    @property
    def is_stuck(self) -> bool:
        """Whether no token at all may come next."""
        if self._inner is None or self.phase == "thought":
            return False
        return self._inner.is_stuck and not (self.phase == "before" and self._opening)


AnyMatcher = Matcher | ThinkingMatcher


def matcher_for(
    grammars: Grammars,
    compiled: CompiledGrammar | None,
    sampling: Sampling,
    stop_ids: Collection[int],
) -> AnyMatcher:
    """What follows one output that has a grammar, a limit to its thinking, or both."""
    inner = None if compiled is None else grammars.matcher(compiled, sampling, stop_ids)
    if sampling.thinking is not None:
        return ThinkingMatcher(
            sampling.thinking, grammars.tokenizer, grammars.vocab_size, stop_ids, inner
        )
    assert inner is not None, "there is nothing to follow"
    return inner
