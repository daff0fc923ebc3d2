"""Tokenizer: text ↔ token ids for one model, from a Hugging Face folder or a GGUF file.

Owns what is added around a text (never two BOS tokens) and where a chat goes through its template;
splitting and merging are the `tokenizers` library's, ids → text is incremental.py's, templates are
chat_template.py's.

    tokenizer = Tokenizer.load(Path("model.gguf"))
    ids = tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}])
    tokenizer.decode(ids, skip_special_tokens=False)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers

from ridgeline.data.chat_template import TrainingText, render_chat, render_for_training
from ridgeline.data.folder_vocabulary import folder_vocabulary
from ridgeline.data.gguf_vocabulary import gguf_vocabulary
from ridgeline.data.incremental import IncrementalDecoder, TokenBytes
from ridgeline.data.tokenizer_files import tokenizer_files
from ridgeline.data.vocabulary import Vocabulary, text_end_id
from ridgeline.errors import ModelNotFoundError, UsageError
from ridgeline.models.checkpoint import open_checkpoint

# Characters from which a text is encoded without its offsets, which take two thirds of the time:
# that way of calling the library wakes its threads.
LONG_TEXT = 1 << 14


class Tokenizer:
    """Safe to share between threads: nothing in it changes after loading."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._pieces = TokenBytes(vocabulary.backend)
        self.vocab_size: int = vocabulary.vocab_size
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_ids: tuple[int, ...] = vocabulary.eos_ids
        self.prefix_ids: tuple[int, ...] = vocabulary.prefix_ids
        self.suffix_ids: tuple[int, ...] = vocabulary.suffix_ids
        self.add_bos: bool = (
            vocabulary.bos_id is not None and vocabulary.bos_id in vocabulary.prefix_ids
        )
        self.chat_template: str | None = vocabulary.chat_templates.get("default")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a folder with tokenizer.json, or from a .gguf file, which may lie in a folder."""
        path = Path(path)
        if path.is_dir():
            if not (path / "tokenizer.json").exists() and any(path.glob("*.gguf")):
                checkpoint = open_checkpoint(path)
                if checkpoint.format == "gguf":
                    return cls.from_gguf(checkpoint.metadata)
            return cls(folder_vocabulary(path))
        if not path.is_file():
            raise ModelNotFoundError(
                f"{path} is neither a folder with tokenizer.json nor a .gguf file"
            )
        return cls.from_gguf(open_checkpoint(path).metadata)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        return cls(gguf_vocabulary(metadata))

    def files(self) -> dict[str, bytes]:
        """The files that make a Hugging Face folder of this tokenizer, by name."""
        return tokenizer_files(self._vocabulary)

    @cached_property
    def digest(self) -> str:
        """Of what makes its ids: another tokenizer has another."""
        return sha256(self.files()["tokenizer.json"]).hexdigest()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of a text, with the model's BOS or EOS where it wants them and the text has none.

        With `parse_special=False`, special tokens written in the text (`<|im_end|>`) stay the plain
        characters they are: for untrusted text, which must not be able to end a turn.
        """
        backend = self._backend if parse_special else self.plain_backend
        try:
            if len(text) < LONG_TEXT:
                ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # what the library raises for a str that has no UTF-8 form
            raise UsageError(_not_text_message(text)) from error
        return self._surround(ids) if add_special_tokens else ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of untrusted texts, on all cores: nothing is added around them, and special tokens
        written in them stay text.
        """
        try:
            encodings = self.plain_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise UsageError(_not_text_message(texts[0])) from error
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of texts that a chat template wrote, special tokens included, and for each where it
        begins and ends in its text, in characters.
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def _surround(self, ids: list[int]) -> list[int]:
        prefix, suffix = list(self._vocabulary.prefix_ids), list(self._vocabulary.suffix_ids)
        if ids and ids[0] == self.bos_id:
            prefix = []
        if suffix and ids[-len(suffix) :] == suffix:
            suffix = []
        return prefix + ids + suffix

    @cached_property
    def plain_backend(self) -> tokenizers.Tokenizer:
        """A copy that takes special tokens for text: in the library a switch on the tokenizer."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that form no character become U+FFFD."""
        return self._pieces.join(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, as bytes: it may be part of a character. Nothing for special
        tokens.
        """
        return b"" if self._pieces.is_special(token_id) else self._pieces[token_id]

    @cached_property
    def missing_bytes(self) -> bytes:
        """Bytes without a token, which `encode` drops: some vocabularies lack a few."""
        return self._pieces.missing()

    def special_id(self, text: str) -> int | None:
        """The special token that is written so, if there is one."""
        return self._pieces.special_id(text)

    def decoder(
        self,
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> IncrementalDecoder:
        """A decoder for ids as they are generated; special tokens in `shown` are never skipped.

        `continuation` says that a text came before, so that the space which sentencepiece puts
        before a first word is a real one and is kept.
        """
        return IncrementalDecoder(
            self._pieces,
            skip_special_tokens=skip_special_tokens,
            strip_start=not continuation,
            shown=shown,
        )

    def template_for(self, *, has_tools: bool) -> str | None:
        """The chat template for conversations with or without tools: some models have two."""
        with_tools = self._vocabulary.chat_templates.get("tool_use") if has_tools else None
        return with_tools or self.chat_template

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """How the special tokens are written."""
        return frozenset(self._special_ids)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def text_end_ids(self) -> list[int]:
        """What a document of plain text ends with in training: what the tokenizer puts after every
        text, else the token that ended texts in pre-training. An end of a turn only where there is
        no other.
        """
        if self.suffix_ids:
            return list(self.suffix_ids)
        end = text_end_id(self.eos_ids, self._special_ids)
        return [] if end is None else [end]

    def training_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> TrainingText:
        """The conversation as the model's template writes it for training: the same every day."""
        return render_for_training(
            self._template(has_tools=bool(tools)),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self._vocabulary.special_texts,
        )

    def _template(self, *, has_tools: bool) -> str:
        template = self.template_for(has_tools=has_tools)
        if template is None:
            raise UsageError(
                "the model has no chat template: give a plain prompt, or a model tuned for chat"
            )
        return template

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the model's template writes it, which also sees `variables`."""
        return render_chat(
            self._template(has_tools=bool(tools)),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self._vocabulary.special_texts, **variables},
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of the conversation. The template decides about BOS: nothing is added to its text."""
        text = self.chat_text(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False)


def _not_text_message(text: object) -> str:
    if not isinstance(text, str):
        return f"cannot encode a {type(text).__name__}; give a str"
    return "the text has half of a surrogate pair (U+D800 to U+DFFF), which is not a character"
