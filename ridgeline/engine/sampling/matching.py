"""Grammars at work: which tokens may come next, as one bit for each.

`Grammars` has them compiled for a tokenizer (grammars/compilers.py) and keeps what was compiled. A
`Matcher` follows one output: it takes the tokens as they are chosen, and says which may
follow, that none may, or that the text is complete. What it says holds for the plain loop and the
engine alike; they differ only in who applies the bits.

    grammars = Grammars(tokenizer, vocab_size)
    task = grammars.compile(sampling.grammar)
    matcher = grammars.matcher(task.result(), sampling, stop_ids)
    matcher.mask()          # [W] int32, bit i of word w is token 32 w + i
    matcher.accept(token)   # then matcher.is_complete
"""

from __future__ import annotations

import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ridgeline.data import Tokenizer
from ridgeline.engine.grammars.compilers import (
    Compilers,
    CompileTask,
    GrammarVocabulary,
    compile_here,
    shared_compilers,
)
from ridgeline.engine.grammars.library import library
from ridgeline.engine.requests.grammar import Grammar
from ridgeline.engine.requests.request import Sampling
from ridgeline.errors import GrammarError, MissingPackageError

BITS = 32  # tokens a word
MAX_KEPT = 256  # compiled grammars
MAX_KEPT_BYTES = 32 << 20  # a large one takes 10 to 40 MB, most a few hundred KB
# White space in a row that JSON may have: enough to indent deeply, and an end to what a model that
# goes astray would write forever.
MAX_WHITESPACE = 20
CompiledGrammar = Any  # xgrammar's


def check_installed() -> None:
    if importlib.util.find_spec("xgrammar") is None:
        raise MissingPackageError(
            "a grammar needs the package xgrammar; try: pip install 'ridgeline[grammar]'"
        )


class Matcher:
    """Where one output stands in its grammar. Tokens without text are never part of it: those of
    them that are stop tokens may be chosen when the text is complete, the others never.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        num_words: int,
        sampling: Sampling,
        stop_ids: Collection[int],
        ends: Collection[int],
        never: np.ndarray,
    ) -> None:
        self._matcher = library().matcher.GrammarMatcher(compiled)
        self._num_words = num_words
        self._ends = frozenset(ends)
        ruled_out = [token for token, bias in sampling.logit_bias.items() if bias == float("-inf")]
        self._never = never | bits_of(ruled_out, num_words)
        self._stops = bits_of(stop_ids, num_words)
        self._end_bits = bits_of(ends, num_words) & ~self._never
        self._min_tokens = sampling.min_tokens
        self._mask: np.ndarray | None = None
        self._has_text = self._is_stuck = False  # of the mask: see _fill
        self._is_ended = False
        self.count = 0  # tokens so far

    def mask(self) -> np.ndarray:
        """The tokens that may come next. All, when none may: the choice is then refused by
        `accept`, on the host, where it can be told.
        """
        if self._mask is None:
            self._mask = self._fill()
        return self._mask

    def accept(self, token: int) -> None:
        """The next token; a GrammarError if it may not be."""
        mask = self.mask()
        if self.is_stuck:
            raise GrammarError(stuck_message(self.count))
        if not int(mask[token // BITS]) >> token % BITS & 1:
            raise GrammarError(f"the grammar does not allow token {token} at position {self.count}")
        if token in self._ends:
            self._is_ended = True
        else:
            accepted = self._matcher.accept_token(token)
            assert accepted, f"token {token} is in the mask and was not accepted"
            self._mask = None
        self.count += 1

    def follow(self, tokens: Sequence[int]) -> None:
        """Come to where these tokens lead: they begin with those that were accepted."""
        for token in tokens[self.count :]:
            self.accept(token)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can be added: no token is needed to say so."""
        if self._is_ended:
            return True
        if not self._matcher.is_completed():
            return False
        self.mask()
        return not self._has_text

    @property
    def is_stuck(self) -> bool:
        """Whether no token at all may come next."""
        self.mask()
        return self._is_stuck

    def _fill(self) -> np.ndarray:
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self._matcher.fill_next_token_bitmask(mask)
        allowed = mask[0] & ~self._never
        too_early = self.count < self._min_tokens
        if too_early:
            allowed &= ~self._stops
        self._has_text = bool(allowed.any())
        if self._matcher.is_completed() and not too_early:
            allowed |= self._end_bits
        self._is_stuck = not allowed.any()
        return np.full_like(allowed, -1) if self._is_stuck else allowed


def bits_of(tokens: Collection[int], num_words: int) -> np.ndarray:
    """Words in which the bits of these tokens are set."""
    bits = np.zeros(num_words * BITS, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Grammars:
    """Compiled grammars, for one vocabulary. For one thread."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, compilers: Compilers | None = None
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._num_words = -(-vocab_size // BITS)
        self._given_compilers = compilers
        self._vocabulary = GrammarVocabulary(self._pieces)
        # In the order of their last use.
        self._kept: OrderedDict[Grammar, CompileTask] = OrderedDict()
        self._waiting: Counter[CompileTask] = Counter()  # how many wait for it

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def compile(
        self, grammar: Grammar, tenant: str = "", since: float | None = None
    ) -> CompileTask:
        """The compiled grammar, at once if it is kept; a GrammarError if it makes no sense. Who
        waits for it no longer says so to `leave`. Grammars of several tenants take turns; `since`
        when it is waited for, where not from now on.
        """
        check_installed()
        task = self._kept.get(grammar)
        if task is None or task.cancelled() or (task.done() and task.exception() is not None):
            task = self._kept[grammar] = self.compilers.submit(
                self._vocabulary, grammar, MAX_WHITESPACE, tenant, since
            )
        self._waiting[task] += 1
        self._kept.move_to_end(grammar)
        self._forget_oldest()
        return task

    def leave(self, task: CompileTask) -> None:
        """One fewer waits for it; when nobody does, it is not compiled any further."""
        self._waiting[task] -= 1
        if self._waiting[task] > 0:
            return
        del self._waiting[task]
        if not task.done():
            self.compilers.abandon(task)
            if self._kept.get(task.grammar) is task:
                del self._kept[task.grammar]

    @property
    def compilers(self) -> Compilers:
        return self._given_compilers or shared_compilers()

    def compile_now(self, grammar: Grammar) -> CompiledGrammar:
        """For the plain loop: in this thread, however long it takes."""
        check_installed()
        return compile_here(self._vocabulary, grammar, MAX_WHITESPACE)

    def matcher(
        self, compiled: CompiledGrammar, sampling: Sampling, stop_ids: Collection[int]
    ) -> Matcher:
        """What follows one output, by what `compile` gave for the sampling's grammar."""
        ends = [token for token in stop_ids if not self._text_of(token)]
        never = np.zeros(self._num_words, dtype=np.int32)
        if sampling.grammar is not None and sampling.grammar.kind.startswith("json"):
            never = self._not_in_json
        return Matcher(compiled, self._num_words, sampling, stop_ids, ends, never)

    @cached_property
    def _not_in_json(self) -> np.ndarray:
        """Tokens with control characters, which JSON's strings may not hold: in those with a
        maxLength, xgrammar 0.2.8 lets all but line ends pass. Line ends stay, for indentation.
        """
        wrong = [
            token
            for token in range(self._vocab_size)
            if any(byte < 0x20 and byte not in b"\n\r" for byte in self._text_of(token))
        ]
        return bits_of(wrong, self._num_words)

    def _pieces(self) -> list[bytes]:
        return [self._text_of(token) for token in range(self._vocab_size)]

    def _text_of(self, token: int) -> bytes:
        """What a token adds to a text: nothing, for special ones and beyond the vocabulary."""
        if token >= self._tokenizer.vocab_size or token in self._tokenizer.eos_ids:
            return b""
        return self._tokenizer.token_bytes(token)

    def _forget_oldest(self) -> None:
        """Keep to the bounds, the newest in any case."""
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_KEPT or sum(map(_num_bytes, self._kept.values())) > MAX_KEPT_BYTES
        ):
            self._kept.popitem(last=False)


def _num_bytes(task: CompileTask) -> int:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return 0
    size: int = task.result().memory_size_bytes
    return size


def stuck_message(count: int) -> str:
    return (
        f"nothing may follow after {count} tokens: the grammar, logit_bias and min_tokens together "
        "rule out every token; change one of them"
    )
