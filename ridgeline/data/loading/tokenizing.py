"""Rows become tokens, by batches: the `tokenizers` library uses every core for one.

A text is one document: what the tokenizer puts before a text, the text, the end-of-text token. Of a
prompt with a completion, the completion and the end are learned; of a conversation, what the
assistant wrote. Special tokens written in texts stay text.

    data = read_tokens([Path("corpus/")], tokenizer)
    data.store, data.quarantine.summary()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.conversations import ConversationText, learned_spans, learned_tokens
from ridgeline.data.loading.corpora import is_corpus, is_mixture, open_corpus, open_mixture
from ridgeline.data.loading.shards import HEAD_NAME, open_shards
from ridgeline.data.loading.sources import (
    CompletionRow,
    ConversationRow,
    DataRow,
    Origin,
    Quarantine,
    TextRow,
    data_files,
    read_rows,
)
from ridgeline.data.loading.store import TokenShard, TokenStore
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.data.vocabulary import token_dtype
from ridgeline.errors import UsageError
from ridgeline.progress import Progress

BATCH_CHARACTERS = 2**22  # tokenized together
BATCH_ROWS = 4096

Encoded = tuple[list[int], NDArray[np.bool_] | None]  # ids, and which are learned (None: all)


@dataclass(frozen=True)
class TokenizedData:
    store: TokenStore
    quarantine: Quarantine
    dropped_bytes: int = 0  # of texts: those that the vocabulary has no token for

    def summary(self) -> str:
        """What was read and what was left out, in one line."""
        store = self.store
        parts = [f"{store.num_tokens:,} tokens in {_number(store.num_documents, 'document')}"]
        if self.quarantine.count:
            parts.append(self.quarantine.summary())
        if self.dropped_bytes:
            dropped = _number(self.dropped_bytes, "byte")
            parts.append(f"{dropped} dropped: the vocabulary has no token for them")
        return "; ".join(parts)


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def read_tokens(
    paths: Sequence[Path], tokenizer: Tokenizer, progress: Progress | None = None
) -> TokenizedData:
    """The tokens of files and folders; of a corpus or a folder with token shards, those."""
    quarantine = Quarantine()
    if is_tokenized(paths):
        return TokenizedData(open_shards(paths[0], tokenizer), quarantine)
    if len(paths) == 1 and is_mixture(paths[0]):
        return TokenizedData(open_mixture(paths[0], tokenizer), quarantine)
    if len(paths) == 1 and is_corpus(paths[0]):
        return TokenizedData(open_corpus(paths[0], tokenizer), quarantine)
    for path in paths:
        if (path / HEAD_NAME).is_file() or is_corpus(path) or is_mixture(path):
            raise UsageError(f"{path} has token shards; give it alone, or mix by `data mix`")
    files = data_files(paths)
    rows = read_rows(_counted(files, progress), quarantine)
    builder = _Builder(tokenizer, quarantine)
    for batch in _batches(rows):
        builder.add_batch(batch)
    if not builder.num_tokens:
        raise UsageError(f"the data has no text in {_names(files)}; {quarantine.summary()}")
    return TokenizedData(builder.store(), quarantine, builder.dropped_bytes)


def is_tokenized(paths: Sequence[Path]) -> bool:
    """Whether it is a folder of token shards, which is opened and not read."""
    return len(paths) == 1 and (paths[0] / HEAD_NAME).is_file()


def _counted(files: Sequence[Path], progress: Progress | None) -> Iterator[Path]:
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        yield file
        done += file.stat().st_size
        if progress is not None:
            progress("tokenizing", done, total)


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{len(files)} files"


def _batches(rows: Iterable[DataRow]) -> Iterator[list[DataRow]]:
    batch: list[DataRow] = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        num_characters += _size(row)
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ROWS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _size(row: DataRow) -> int:
    match row:
        case TextRow():
            return len(row.text)
        case CompletionRow():
            return len(row.prompt) + len(row.completion)
        case ConversationRow():
            return sum(len(str(message.get("content", ""))) for message in row.messages)


@dataclass
class _Builder:
    """Documents as they come; where all of a row is learned, nothing is noted."""

    tokenizer: Tokenizer
    quarantine: Quarantine
    _tokens: list[NDArray[Any]] = field(default_factory=list)
    _counted: list[NDArray[np.bool_]] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _origins: list[tuple[int, int]] = field(default_factory=list)
    _files: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    dropped_bytes: int = 0
    _is_marked: bool = False

    @property
    def _completion_end(self) -> list[int]:
        """The end that generation stops at first, which a text's end need not be."""
        return list(self.tokenizer.suffix_ids or self.tokenizer.eos_ids[:1])

    def add_batch(self, rows: Sequence[DataRow]) -> None:
        """In the order of the rows, whatever kinds they are of."""
        encoded = {
            **self._texts([row for row in rows if isinstance(row, TextRow)]),
            **self._completions([row for row in rows if isinstance(row, CompletionRow)]),
            **self._conversations([row for row in rows if isinstance(row, ConversationRow)]),
        }
        for row in rows:
            if id(row) in encoded:
                ids, counted = encoded[id(row)]
                self._add(row, ids, counted)

    def _texts(self, rows: Sequence[TextRow]) -> dict[int, Encoded]:
        encoded: dict[int, Encoded] = {}
        if missing := self.tokenizer.missing_bytes:
            for row in rows:
                data = row.text.encode()
                self.dropped_bytes += len(data) - len(data.translate(None, missing))
        for row, ids in zip(rows, self.tokenizer.encode_many([r.text for r in rows]), strict=True):
            before = list(self.tokenizer.prefix_ids) if row.is_first else []
            encoded[id(row)] = (
                before + ids + (self.tokenizer.text_end_ids if row.is_last else []),
                None,
            )
        return encoded

    def _completions(self, rows: Sequence[CompletionRow]) -> dict[int, Encoded]:
        """Prompt and completion are tokenized in one, unless a token would lie across their border:
        the model gets the prompt's own tokens and goes on from there.
        """
        prompts = self.tokenizer.encode_many([row.prompt for row in rows])
        wholes = self.tokenizer.encode_many([row.prompt + row.completion for row in rows])
        completions = self.tokenizer.encode_many([row.completion for row in rows])
        encoded: dict[int, Encoded] = {}
        for row, prompt, whole, alone in zip(rows, prompts, wholes, completions, strict=True):
            is_prefix = whole[: len(prompt)] == prompt
            learned = (whole[len(prompt) :] if is_prefix else alone) + self._completion_end
            before = [*self.tokenizer.prefix_ids, *prompt]
            counted = np.repeat([False, True], [len(before), len(learned)])
            encoded[id(row)] = (before + learned, counted)
        return encoded

    def _conversations(self, rows: Sequence[ConversationRow]) -> dict[int, Encoded]:
        conversations = [(row, text) for row in rows if (text := self._rendered(row)) is not None]
        texts = [conversation.text for _, conversation in conversations]
        encodings = self.tokenizer.encode_with_offsets(texts)
        encoded: dict[int, Encoded] = {}
        for (row, conversation), (ids, offsets) in zip(conversations, encodings, strict=True):
            try:
                counted = learned_tokens(conversation, ids, offsets, self.tokenizer.eos_ids)
            except UsageError as error:
                self.quarantine.add(row.origin, str(error))
            else:
                encoded[id(row)] = (ids, counted)
        return encoded

    def _rendered(self, row: ConversationRow) -> ConversationText | None:
        if self.tokenizer.template_for(has_tools=bool(row.tools)) is None:
            raise UsageError(
                f"{row.origin} has messages, and the model has no chat template; give text, prompt "
                "and completion, or a model tuned for chat"
            )
        try:
            return learned_spans(self.tokenizer, row.messages, row.tools)
        except UsageError as error:
            self.quarantine.add(row.origin, str(error))
            return None

    def _add(self, row: DataRow, ids: list[int], counted: NDArray[np.bool_] | None) -> None:
        if not isinstance(row, TextRow) or row.is_first:
            self._starts.append(self.num_tokens)
            self._origins.append((self._file_number(row.origin), row.origin.line))
        self._tokens.append(np.array(ids, dtype=token_dtype(self.tokenizer.vocab_size)))
        self._is_marked |= counted is not None
        self._counted.append(np.ones(len(ids), np.bool_) if counted is None else counted)
        self.num_tokens += len(ids)

    def _file_number(self, origin: Origin) -> int:
        return self._files.setdefault(origin.file, len(self._files))

    def store(self) -> TokenStore:
        offsets = np.array([*self._starts, self.num_tokens], dtype=np.int64)
        is_full = np.diff(offsets) > 0
        origins = np.array(self._origins, dtype=np.int64)
        files = list(self._files)
        for file, line in origins[~is_full].tolist():
            self.quarantine.add(Origin(files[file], line), "the tokenizer makes no token of it")
        shard = TokenShard(
            tokens=np.concatenate(self._tokens),
            offsets=np.append(offsets[:-1][is_full], offsets[-1]),
            origins=origins[is_full],
            counted=np.concatenate(self._counted) if self._is_marked else None,
        )
        return TokenStore([shard], files, self.tokenizer.vocab_size)
