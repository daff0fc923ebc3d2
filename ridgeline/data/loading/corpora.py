"""Built corpora (`ridgeline data build`), and mixtures of them, as a `TokenStore`: the tokens stay
in the mapped files.

store = open_corpus(Path("corpus"), tokenizer)
store.origin(store.document_of(123456))         # the file, and the byte where the document begins
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.data.corpus.names import INDEX_NAME
from ridgeline.data.loading.mixture import MIXTURE_NAME, read_mixture
from ridgeline.data.loading.store import MixedStore, TokenShard, TokenStore
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import MissingPackageError, UsageError


def is_corpus(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()


def open_corpus(folder: Path, tokenizer: Tokenizer | None = None) -> TokenStore:
    """With a tokenizer, only if it is the one that wrote it."""
    try:
        from ridgeline.data.corpus.shards import open_token_file, read_index
    except ImportError as error:
        raise MissingPackageError(
            f"{folder} is a corpus of Arrow files, which needs the package {error.name}; try: "
            "pip install 'ridgeline[train]'"
        ) from None
    index = read_index(folder)
    if tokenizer is not None and index.tokenizer != tokenizer.digest:
        raise UsageError(
            f"{folder} was tokenized with another tokenizer than the model's; build it again"
        )
    shards, files = list[TokenShard](), list[str]()
    for entry in index.shards:
        file = open_token_file(folder / entry.tokens)
        if not len(file.ids):
            continue  # every document of the unit was dropped
        shards.append(
            TokenShard(file.ids, file.offsets, file.places, first_file=len(files), by_byte=True)
        )
        files += file.head.files
    if not shards:
        raise UsageError(f"{folder} has no tokens: every document was dropped; build another")
    return TokenStore(shards, files, index.vocab_size)


def is_mixture(path: Path) -> bool:
    return (path / MIXTURE_NAME).is_file()


def open_mixture(folder: Path, tokenizer: Tokenizer | None = None) -> TokenStore:
    """The corpora that a mixture names, as one store."""
    mixture = read_mixture(folder)
    shards, files, counts, sizes = list[TokenShard](), list[str](), list[int](), set[int]()
    for each in mixture.corpora:
        corpus = folder / each.corpus
        if not is_corpus(corpus):
            raise UsageError(f"{folder / MIXTURE_NAME} names {corpus}, which is no built corpus")
        store = open_corpus(corpus, tokenizer)
        shards += [
            replace(shard, first_file=shard.first_file + len(files)) for shard in store.shards
        ]
        files += store.files
        counts.append(len(store.shards))
        sizes.add(store.vocab_size)
    if len(sizes) > 1:
        raise UsageError(f"{folder} mixes corpora of different tokenizers; build them with one")
    return TokenStore(shards, files, max(sizes), MixedStore(mixture, tuple(counts)))


def corpora_of(folder: Path) -> list[Path]:
    """The corpus in a folder, or those that its mixture names."""
    if is_mixture(folder):
        return [folder / each.corpus for each in read_mixture(folder).corpora]
    if not is_corpus(folder):
        raise UsageError(
            f"{folder} is no corpus: it has no {INDEX_NAME}; give what `data build` made"
        )
    return [folder]
