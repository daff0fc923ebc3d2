"""A small model and batches of packed documents for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ridgeline.data.loading.packing import IGNORED, PackedBatch
from ridgeline.models import Transformer
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import SHAPES
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.training.config import TrainConfig


def pack(*documents: Sequence[int], ignored: Sequence[int] = ()) -> PackedBatch:
    """Documents end to end; a document's last token has nothing to predict, and neither have the
    rows of `ignored`.
    """
    targets = torch.tensor([id for text in documents for id in (*text[1:], IGNORED)])
    targets[list(ignored)] = IGNORED
    return PackedBatch.of(
        torch.tensor([id for text in documents for id in text]),
        targets,
        torch.cat([torch.arange(len(text)) for text in documents]),
        torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int32),
    )


def draw(*lengths: int, vocab: int = 131, seed: int = 0) -> list[list[int]]:
    """Random documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (size,), generator=generator).tolist() for size in lengths]


FP32 = TrainConfig(precision="fp32")
# Batches whose counted tokens differ: 20 + 4, 8 - 3, 15.
BATCHES = [
    pack(*draw(21, 5)),
    pack(*draw(9, seed=1), ignored=(0, 1, 2)),
    pack(*draw(16, seed=2)),
]
TINY = SHAPES["tiny"] | {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48}


def tiny(device: str = "cpu", **changes: Any) -> Transformer:
    """A tied Llama of two layers."""
    config = describe_hf(TINY | changes, origin="tiny").config
    return fill_random(build_model(config, torch.float32, device))
