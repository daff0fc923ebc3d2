"""The errors a user can cause, one exit code each.

Every error here carries one line that says what was given, what is allowed and what to try. The
command line prints that line and exits with the class's code; Python callers catch `RidgelineError`
or the class they mean.

    raise UsageError("temperature is -1.0; give 0 (greedy) or a positive number")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

Answered = TypeVar("Answered", bound=Callable[..., Any])


class RidgelineError(Exception):
    """Anything a user can cause. Never raised itself: each kind has its class and its exit code."""

    exit_code = 1


class UsageError(RidgelineError, ValueError):
    """A flag or argument with a value that is not allowed."""

    exit_code = 2


class OptionError(UsageError, TypeError):
    """A keyword that a function or class does not have."""


class ModelNotFoundError(RidgelineError, FileNotFoundError):
    """The model named is not a folder, a GGUF file, a reachable hub name or `demo`."""

    exit_code = 3


class CheckpointError(RidgelineError, ValueError):
    """A checkpoint's files are corrupt, truncated, refused, or do not fit the model."""

    exit_code = 4


class ConfigError(RidgelineError, ValueError):
    """A model's configuration lacks a field or holds a value that makes no sense."""

    exit_code = 5


class UnsupportedError(RidgelineError, ValueError):
    """Well-formed, but outside what Ridgeline can run."""

    exit_code = 6


class ContextLengthError(RidgelineError, ValueError):
    """A prompt that does not fit into the model's context."""

    exit_code = 7


class HardwareError(RidgelineError, RuntimeError):
    """The device asked for is absent, or failed while it was used."""

    exit_code = 8


class OutOfMemoryError(RidgelineError, MemoryError):
    """What was asked for does not fit into the device's or the host's memory."""

    exit_code = 9


class OutputError(RidgelineError, OSError):
    """A result could not be written. Nothing half-written is left behind."""

    exit_code = 10


class OfflineError(RidgelineError, ConnectionError):
    """The hub or the package registry could not be reached."""

    exit_code = 11


class MissingPackageError(RidgelineError, ImportError):
    """An optional package is needed for this and is not installed."""

    exit_code = 12


class NumericsError(RidgelineError, ArithmeticError):
    """A model computed NaN or infinity."""

    exit_code = 14


class RequestError(RidgelineError, RuntimeError):
    """A request ended without an answer."""

    exit_code = 15


class GrammarError(RidgelineError, ValueError):
    """A grammar that cannot be followed."""

    exit_code = 16


class QualityError(RidgelineError, ValueError):
    """A changed model is outside the quality bound it was held to."""

    exit_code = 17


class CorpusError(RidgelineError, ValueError):
    """A corpus that cannot be built from what is there, or that is damaged."""

    exit_code = 18


CHECK_FAILED_EXIT_CODE = 13  # a check ran and failed
INTERNAL_EXIT_CODE = 70  # a bug in Ridgeline
INTERRUPTED_EXIT_CODE = 130  # Ctrl-C, by shell convention


LEAST_LIKENESS = 0.6  # of a suggestion, from 0 to 1: as difflib has it


def near_matches(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'top_p'?` for an error line, or nothing when no allowed word is close."""
    words = list(allowed)
    close = [known for known in words if len(word) > 2 and known.startswith(word)][:3]
    close = close or [
        match for match in get_close_matches(word, words, n=3) if _is_near(word, match, words)
    ]
    if not close:
        return ""
    return "; did you mean " + " or ".join(repr(match) for match in close) + "?"


def _is_near(word: str, match: str, words: list[str]) -> bool:
    """Whether they are alike by more than an ending that other allowed words have too:
    GptOssForCausalLM is not GraniteForCausalLM.
    """
    endings = [_shared_ending(match, word, other) for other in words if other != match]
    length = max(endings, default=0)
    if length in (0, len(word)):
        return True
    parts = SequenceMatcher(None, word[:-length], match[:-length])
    return parts.ratio() >= LEAST_LIKENESS


def _shared_ending(*words: str) -> int:
    """How many characters all of them end with."""
    length = 0
    while length < min(map(len, words)) and len({word[-length - 1] for word in words}) == 1:
        length += 1
    return length


def answers_wrong_options(*parts: type) -> Callable[[Answered], Answered]:
    """Decorates a function, or a class for its constructor: a keyword that it does not have is
    answered with the nearest that it has, or with the one of `parts` (dataclasses that it takes)
    where it belongs.

        @answers_wrong_options()
        @dataclass(frozen=True)
        class Sampling: ...

        Sampling(max_token=5)       # Sampling has no option 'max_token'; did you mean 'max_tokens'?
    """

    def decorate(target: Answered) -> Answered:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        names = list(signature(function).parameters)[1:]
        allowed = frozenset(names)

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if not allowed.issuperset(options):
                wrong = next(name for name in options if name not in allowed)
                raise OptionError(_wrong_option(target.__name__, wrong, names, parts))
            return function(*args, **options)

        if not isinstance(target, type):
            return checked  # type: ignore[return-value]
        target.__init__ = checked  # type: ignore[misc]
        return target

    return decorate


def _wrong_option(owner: str, name: str, allowed: list[str], parts: tuple[type, ...]) -> str:
    message = f"{owner} has no option {name!r}"
    for part in parts:
        if name in {field.name for field in dataclasses.fields(part)}:
            return f"{message}; it belongs to {part.__name__}: {part.__name__}({name}=...)"
    listed = ", ".join(word for word in allowed if not word.startswith("_"))
    return message + (near_matches(name, allowed) or f"; it has {listed}")
