"""From a checkpoint to a model that runs: `load_model` is the one door."""

from ridgeline.quantization.load import load_model

__all__ = ["load_model"]
