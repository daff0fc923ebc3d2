"""The tokenizer inside a GGUF file, built from its `tokenizer.ggml.*` metadata.

Supported models use one of two kinds: `gpt2` (byte-level BPE: tokens, merges and a named rule for
splitting words) and `llama` (sentencepiece BPE: tokens with scores, spaces as `▁`, unknown
characters as byte tokens). Others are rejected.

    vocabulary = gguf_vocabulary(open_checkpoint("model.gguf").metadata)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from ridgeline.data.pre_tokenizers import SplitRule, split_rule
from ridgeline.data.vocabulary import Vocabulary, end_ids
from ridgeline.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_SPECIAL_KEYS = ("bos", "eos", "unknown", "padding")  # `tokenizer.ggml.<key>_token_id`
_TEMPLATE_NAMES = {
    "unknown": "unk",
    "padding": "pad",
}  # chat templates say `unk_token`, `pad_token`
_MORE_END_KEYS = ("eot", "eom")
_SENTENCEPIECE_DEFAULTS = {
    "bos": 1,
    "eos": 2,
    "unknown": 0,
}  # llama.cpp's, where the file names none


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ConfigError("the GGUF has no tokenizer: tokenizer.ggml.model is missing")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"tokenizer.ggml.model is {kind!r}; supported: gpt2 (byte-level BPE) and llama"
            " (sentencepiece)"
        )
    fields = _VocabularyFields(metadata)
    ids = fields.special_ids(_SENTENCEPIECE_DEFAULTS if kind == "llama" else {})
    if kind == "gpt2":
        rule = _rule(metadata)
        backend, adds_bos = _byte_level(fields, rule), rule.adds_bos
    else:
        backend, adds_bos = _sentencepiece(fields, ids.get("unknown")), True
    controls = _add_tokens(backend, fields, ids)

    bos_id, eos_id = ids.get("bos"), ids.get("eos")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    named_ends = [ids[key] for key in ("eos", *_MORE_END_KEYS) if key in ids]
    return Vocabulary(
        backend=backend,
        vocab_size=len(fields.tokens),
        bos_id=bos_id,
        eos_ids=end_ids(named_ends, controls),
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        suffix_ids=(eos_id,) if add_eos and eos_id is not None else (),
        special_texts={
            f"{_TEMPLATE_NAMES.get(key, key)}_token": fields.tokens[ids[key]]
            for key in _SPECIAL_KEYS
            if key in ids
        },
        chat_templates=_chat_templates(metadata),
    )


class _VocabularyFields:
    """The arrays of the vocabulary, checked to fit each other."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        # llama.cpp also names empty tokens
        self.tokens = [
            text or f"[EMPTY_{index}]" for index, text in enumerate(self._array("tokens", str))
        ]
        self.ids = {text: index for index, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ConfigError(
                f"tokenizer.ggml.tokens holds the token {_repeated(self.tokens)!r} twice"
            )
        self.types = self._array("token_type", int, default=[_NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise ConfigError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries"
                f" for {len(self.tokens)} tokens"
            )

    def _array(self, name: str, kind: type, default: Sequence[Any] | None = None) -> Sequence[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if values is None:
            raise ConfigError(f"the GGUF's tokenizer has no tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise ConfigError(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
        return values

    def special_ids(self, defaults: Mapping[str, int]) -> dict[str, int]:
        """The ids named by the file, by key; one past the vocabulary is an error."""
        ids = {key: token_id for key, token_id in defaults.items() if token_id < len(self.tokens)}
        for key in (*_SPECIAL_KEYS, *_MORE_END_KEYS):
            token_id = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
                raise ConfigError(
                    f"tokenizer.ggml.{key}_token_id is {token_id},"
                    f" but there are {len(self.tokens)} tokens"
                )
            ids[key] = int(token_id)
        return ids

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs in the order of merging; the first space past the first character separates."""
        if self._metadata.get("tokenizer.ggml.merges") is None:
            return None
        lines = self._array("merges", str)
        cuts = [line.find(" ", 1) for line in lines]
        if -1 in cuts:
            raise ConfigError(
                f"tokenizer.ggml.merges holds {lines[cuts.index(-1)]!r}, which is not a pair"
            )
        pairs = [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]
        for left, right in pairs:
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise ConfigError(
                    f"tokenizer.ggml.merges joins {left!r} and {right!r}:"
                    " they and what they give are not all tokens"
                )
        return pairs

    def scores(self) -> Sequence[float]:
        scores = self._array("scores", float)
        if len(scores) != len(self.tokens):
            raise ConfigError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.tokens)} tokens"
            )
        return scores

    @property
    def add_space_prefix(self) -> bool:
        return bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))

    @property
    def strips_after_special(self) -> bool:
        """Phi-3's tokenizer drops spaces after special tokens; its GGUF says so only by name."""
        name = str(self._metadata.get("general.name", "")).lower()
        return "phi-3" in name or "phi3" in name


def _repeated(tokens: Sequence[str]) -> str:
    ordered = sorted(tokens)
    return next(left for left, right in pairwise(ordered) if left == right)


def _rule(metadata: Mapping[str, Any]) -> SplitRule:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning(
            "tokenizer.ggml.pre is missing (a GGUF from before April 2024): text is split by the"
            " default rule, which may differ from the model's own; convert the model again"
        )
        name = "default"
    return split_rule(str(name))


def _byte_level(fields: _VocabularyFields, rule: SplitRule) -> tokenizers.Tokenizer:
    merges = fields.merges()
    if merges is None:
        raise ConfigError("the GGUF's tokenizer has no tokenizer.ggml.merges")
    model = models.BPE(vocab=fields.ids, merges=merges, ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _VocabularyFields, unknown_id: int | None) -> tokenizers.Tokenizer:
    unknown = fields.tokens[unknown_id] if unknown_id is not None else None
    if unknown is None and any(f"<0x{byte:02X}>" not in fields.ids for byte in range(256)):
        raise ConfigError(
            "the GGUF's tokenizer has neither all 256 byte tokens nor an unknown token"
        )
    merges = _merges_from_scores(fields)
    model = models.BPE(
        vocab=fields.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(fields: _VocabularyFields) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose union scores best: every cut of each, best first."""
    scores = fields.scores()
    normal = {text: index for text, index in fields.ids.items() if fields.types[index] == _NORMAL}
    long_pieces = [(scores[index], text) for text, index in normal.items() if len(text) > 1]
    if len(long_pieces) > 1 and len({score for score, _ in long_pieces}) == 1:
        if (merges := fields.merges()) is not None:
            return merges
        raise UnsupportedError(
            "tokenizer.ggml.scores gives every token the same score and there are no merges:"
            " the order in which tokens join is not known; convert the model again"
        )
    long_pieces.sort(
        key=lambda scored: -scored[0]
    )  # stable: equal scores stay in the order of their ids
    return [
        (text[:cut], text[cut:])
        for _, text in long_pieces
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]


def _add_tokens(
    backend: tokenizers.Tokenizer, fields: _VocabularyFields, ids: Mapping[str, int]
) -> dict[str, int]:
    """Makes control tokens special, user-defined ones indivisible; returns the special by text."""
    unstripped = {"<unk>", "<s>", "<|endoftext|>"}  # in Phi-3
    named = set(ids.values())
    special: dict[str, int] = {}
    user_defined: list[AddedToken] = []
    for text, index in fields.ids.items():
        kind = fields.types[index]
        if kind in (_UNKNOWN, _CONTROL) or index in named:
            special[text] = index
        elif kind == _USER_DEFINED:
            user_defined.append(AddedToken(text, normalized=False))
    backend.add_special_tokens(
        [
            AddedToken(
                text,
                special=True,
                normalized=False,
                rstrip=fields.strips_after_special and text not in unstripped,
            )
            for text in special
        ]
    )
    backend.add_tokens(user_defined)
    return special


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): str(text)
        for name, text in metadata.items()
        if name.startswith(f"{key}.")
    }
    return {**named, "default": str(metadata[key])} if key in metadata else named
