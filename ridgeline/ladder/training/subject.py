"""What a climb of training trains: the model, and tokens to train it on. Without `--data` a text
that every Python has; a shape without a tokenizer takes its bytes for tokens.

    subject = open_subject(config, "cpu")
    subject.windows.batch(samples)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import default_text
from ridgeline.data.loading.split import split_data
from ridgeline.data.loading.store import TokenShard, TokenStore
from ridgeline.data.loading.tokenizing import read_tokens
from ridgeline.data.loading.windows import TokenWindows
from ridgeline.data.vocabulary import token_dtype
from ridgeline.models.config import ModelConfig
from ridgeline.models.shapes import check_one, describe_shape
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.training.prepare import check_length
from ridgeline.training.starting_model import StartingModel, model_source, teacher_source

BUILT_IN = "Python's help, which is built in"
BYTES = 256  # tokens of a text that no tokenizer has cut


@dataclass(frozen=True)
class TrainSubject:
    source: StartingModel
    windows: TokenWindows
    data: str  # in words

    @property
    def model(self) -> ModelConfig:
        return self.source.description.config


def open_subject(config: TrainConfig, progress: Progress | None = None) -> TrainSubject:
    """Anything wrong with model or data is said here."""
    check_one(config.model, config.shape)
    source = climb_source(config, progress)
    model = source.description.config
    check_length(config, model)
    source = replace(source, teacher=teacher_source(config, model, progress))
    if config.data.path is not None and source.tokenizer is not None:
        store = read_tokens([Path(config.data.path)], source.tokenizer, progress).store
        data = config.data.path
    else:
        store, data = built_in(source.tokenizer, config.data.sequence_length), BUILT_IN
    windows = split_data(
        store, sequence_length=config.data.sequence_length, vocab_size=model.vocab_size
    ).train
    return TrainSubject(source, windows, data)


def climb_source(config: TrainConfig, progress: Progress | None) -> StartingModel:
    """A shape needs a tokenizer for text of the user's alone."""
    if config.shape is not None and config.tokenizer is None and config.data.path is None:
        return StartingModel(describe_shape(config.shape), None, None)
    return model_source(config, progress)


def built_in(tokenizer: Tokenizer | None, length: int) -> TokenStore:
    """One document, of two sequences at least."""
    text = default_text()
    if tokenizer is None:
        ids, vocab_size = np.frombuffer(text.encode(), dtype=np.uint8), BYTES
    else:
        ids, vocab_size = np.array(tokenizer.encode(text)), tokenizer.vocab_size
    if len(ids) < 2 * length:
        ids = np.resize(ids, 2 * length)
    shard = TokenShard(
        ids.astype(token_dtype(vocab_size)), np.array([0, len(ids)]), np.array([[0, 1]])
    )
    return TokenStore([shard], [BUILT_IN], vocab_size)
