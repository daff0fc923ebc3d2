"""How a GGUF's `tokenizer.ggml.pre` splits text into words before byte-level merges.

The names and which rule each selects are facts of llama.cpp (src/llama-vocab.cpp at 00ad355e);
the regexes are those of the models' own tokenizer.json, where llama.cpp's are approximations of
them. A name that is not in the table is rejected: a wrong split would silently give wrong ids.

    rule = split_rule("smollm")  # every digit by itself, then GPT-2's words
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from ridgeline.errors import UnsupportedError, near_matches

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _cl100k(digits: str, letters: str = r"\p{L}") -> str:
    """The GPT-4 family's rule: words with one sign before them, signs with line ends after."""
    others = r"\p{L}\p{N}" if letters == r"\p{L}" else r"\p{L}\p{M}\p{N}"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{others}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_SPACES}"
    )


def _o200k(digits: str, contractions: str) -> str:
    """The GPT-4o family's rule: words also split where lower case turns into upper case."""
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{sign}{_UPPER}*{_LOWER}+{contractions}|{sign}{_UPPER}+{_LOWER}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)


@dataclass(frozen=True)
class SplitRule:
    """Regexes applied one after another; text between matches becomes its own piece."""

    regexes: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token is taken whole, merges or not
    nfc: bool = False  # the model's own tokenizer composes characters first (Unicode NFC)
    adds_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in self.regexes]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_DEFAULT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_WORDS = SplitRule((_GPT2,))
_SINGLE_DIGITS = SplitRule((r"\p{N}", _GPT2))
_THREE_DIGITS = SplitRule((_cl100k(r"\p{N}{1,3}"),))
_LLAMA3 = SplitRule(_THREE_DIGITS.regexes, whole_words=True, adds_bos=True)
_QWEN2 = SplitRule((_cl100k(r"\p{N}"),))
_GPT4O = SplitRule((_o200k(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_DEEPSEEK3 = SplitRule(
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS)
)

_RULES: dict[str, SplitRule] = {
    "default": _DEFAULT,
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    # NFC: what transformers' own classes for these models do (gpt_neox, cohere, qwen2, qwen3_5;
    # 5.22)
    "mpt": SplitRule((_GPT2,), nfc=True),
    "olmo": SplitRule((_GPT2,), nfc=True),
    "command-r": SplitRule((r"\p{N}", _GPT2), nfc=True),
    "qwen2": SplitRule(_QWEN2.regexes, nfc=True),
    "qwen35": SplitRule((_cl100k(r"\p{N}", r"[\p{L}\p{M}]"),), nfc=True),
    "tekken": SplitRule((_o200k(r"\p{N}", ""),), whole_words=True, adds_bos=True),
    "seed-coder": SplitRule(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
            rf"|\s*[\r\n]+|{_SPACES}",
        )
    ),
}
_SAME_RULE: list[tuple[SplitRule, str]] = [
    (_WORDS, "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4"),
    (_SINGLE_DIGITS, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (_THREE_DIGITS, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_QWEN2, "deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
]
_RULES.update((name, rule) for rule, names in _SAME_RULE for name in names.split())

KNOWN_NAMES = tuple(sorted(_RULES))


def split_rule(name: str) -> SplitRule:
    if name not in _RULES:
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported"
            f"{near_matches(name, KNOWN_NAMES)}; supported: {', '.join(KNOWN_NAMES)}"
        )
    return _RULES[name]
