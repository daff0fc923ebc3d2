"""From a checkpoint to a model that runs (`load_model`), and back (`save_model`)."""

from ridgeline.quantization.export import save_model
from ridgeline.quantization.load import load_model

__all__ = ["load_model", "save_model"]
