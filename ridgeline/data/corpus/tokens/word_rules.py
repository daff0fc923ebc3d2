"""Which of the native kernel's word rules a tokenizer's own pipeline is, read from its JSON.

Rules are compared as they are written: a regex that is not known to the letter is not guessed at.

    word_rule(json.loads(backend.to_str()))     # Recognized(rule, digits, composes), or the reason
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.data.pre_tokenizers import split_rule
from ridgeline.errors import UnsupportedError
from ridgeline.kernels.byte_pairs import LETTER, MARK, WordRule


@dataclass(frozen=True)
class Recognized:
    rule: WordRule
    alone: Mapping[str, Any] | None = None  # the step whose characters are words by themselves
    composes: bool = False  # the tokenizer first puts characters together (Unicode's NFC)


# By names of data/pre_tokenizers.py, which has the regexes.
_NAMED = {
    "gpt-2": WordRule("gpt2"),
    "llama3": WordRule("gpt4", max_digits=3),
    "qwen2": WordRule("gpt4"),
    "qwen35": WordRule("gpt4", letters=LETTER | MARK),
    "gpt-4o": WordRule("gpt4o", max_digits=3, contractions=True, slash_tail=True),
    "tekken": WordRule("gpt4o", slash_tail=True),
}
_BY_REGEX = {split_rule(name).regexes[0]: rule for name, rule in _NAMED.items()}
_DIGIT = r"\p{N}"


def word_rule(pipeline: Mapping[str, Any]) -> Recognized:
    """UnsupportedError with the reason where the kernel has no such rule."""
    composes = _composes(pipeline["normalizer"])
    *splits, last = _steps(pipeline["pre_tokenizer"])
    if last.get("type") != "ByteLevel":
        raise UnsupportedError("its words are not cut into bytes")
    if last["add_prefix_space"]:
        raise UnsupportedError("it puts a space before every text")
    regexes = [_regex_of(step) for step in splits if step["type"] != "Digits"]
    alone = next((step for step in splits if step["type"] == "Digits"), None)
    if last["use_regex"]:
        regexes.append(split_rule("gpt-2").regexes[0])
    if len(regexes) == 2 and regexes[0] == _DIGIT and alone is None:
        alone, regexes = splits[0], regexes[1:]
    is_first = alone is None or splits[0] == alone
    if len(regexes) != 1 or regexes[0] not in _BY_REGEX or not is_first:
        raise UnsupportedError(f"its words are split by another rule: {' then '.join(regexes)}")
    rule = _BY_REGEX[regexes[0]]
    if alone is not None and rule.family != "gpt2":
        raise UnsupportedError("it splits digits before a rule that counts them")
    return Recognized(rule, alone, composes)


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        raise UnsupportedError("it does not split text into words")
    steps = [step] if step["type"] != "Sequence" else list(step["pretokenizers"])
    if not steps:
        raise UnsupportedError("it does not split text into words")
    for each in steps:
        if each["type"] not in ("Split", "Digits", "ByteLevel"):
            raise UnsupportedError(f"its words are split by {each['type']}")
    return steps


def _regex_of(step: Mapping[str, Any]) -> str:
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        raise UnsupportedError(f"its words are split by {step}")
    pattern = step["pattern"].get("Regex")
    if not isinstance(pattern, str):
        raise UnsupportedError(f"its words are split by {step['pattern']}")
    return pattern


def _composes(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is not None and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
        normalizer = None if not steps else steps[0] if len(steps) == 1 else normalizer
    if normalizer is None:
        return False
    if normalizer["type"] != "NFC":
        raise UnsupportedError(f"it changes texts first, by {normalizer['type']}")
    return True
