"""Running a model: what a request may ask for, and the plain loop that defines the right answer."""

from ridgeline.engine.naive import Generation, generate, generate_tokens
from ridgeline.engine.request import Sampling

__all__ = ["Generation", "Sampling", "generate", "generate_tokens"]
