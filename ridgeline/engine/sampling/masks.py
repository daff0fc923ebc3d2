"""Grammars' masks on the device: one bit a token goes over, what is ruled out becomes -inf.

Each byte is looked up in a table of all 256 with their eight entries: two kernels, and nothing of
the vocabulary's size but the result. Letters: R rows, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.engine.steps.transfer import to_device

BITS_A_BYTE = 8


class Masks:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        values = np.arange(2**BITS_A_BYTE, dtype=np.uint8)[:, None]
        allowed = np.unpackbits(values, axis=1, bitorder="little").astype(bool)
        self.table = to_device(np.where(allowed, 0.0, -np.inf).astype(np.float32), device)

    def bias(self, masks: Sequence[np.ndarray | None]) -> Tensor:
        """What is added to the logits [R, V]: 0 where a bit is set, -inf elsewhere. None is for a
        row without a grammar.
        """
        everything = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
        words_RW = np.stack([everything if mask is None else mask for mask in masks])
        sent_RW = to_device(words_RW, self.device)
        entries = functional.embedding(sent_RW.view(torch.uint8).int(), self.table)
        return entries.view(len(masks), -1)[:, : self.vocab_size]
