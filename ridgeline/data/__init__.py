"""Text in, token ids out and back: tokenizers, chat templates, incremental decoding."""

from ridgeline.data.incremental import IncrementalDecoder
from ridgeline.data.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer"]
