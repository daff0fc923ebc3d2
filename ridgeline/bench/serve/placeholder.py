"""A tokenizer for a model that has none, as one with random weights: every id has a text of its
own, so that a server has something to send. Prompts are sent as ids.

    with served_folder(path) as folder: ...      # path itself, where it has a tokenizer
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe

EOS = "<|end|>"


@contextmanager
def served_folder(path: Path) -> Iterator[Path]:
    if tokenizer_of(path) is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ridgeline-bench-") as name:
        folder = Path(name)
        for file in path.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        write_tokenizer(folder, describe(open_checkpoint(path)).config.vocab_size)
        yield folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    words = [f"Ġw{number}" for number in range(vocab_size - 1 - len(letters))]
    vocabulary = {token: number for number, token in enumerate([*letters, *words, EOS])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
