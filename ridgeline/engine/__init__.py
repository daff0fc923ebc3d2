"""Running a model: what a request may ask for, the engine that runs many at once, and the plain
loop that defines the right answer.

Names are loaded on first use: scheduling has no torch in it, and importing it brings none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.engine.engine import Engine
    from ridgeline.engine.naive import Generation, generate_tokens, reference_generate
    from ridgeline.engine.requests.grammar import Grammar
    from ridgeline.engine.requests.request import Sampling
    from ridgeline.engine.requests.thinking import Thinking
    from ridgeline.engine.sampling.outputs import Completion, Delta, Output

_LAZY = {
    "Completion": "sampling.outputs",
    "Delta": "sampling.outputs",
    "Engine": "engine",
    "Generation": "naive",
    "Grammar": "requests.grammar",
    "Output": "sampling.outputs",
    "Sampling": "requests.request",
    "Thinking": "requests.thinking",
    "reference_generate": "naive",
    "generate_tokens": "naive",
}

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Generation",
    "Grammar",
    "Output",
    "Sampling",
    "Thinking",
    "generate_tokens",
    "reference_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ridgeline.engine' has no attribute {name!r}")
    return getattr(import_module(f"ridgeline.engine.{_LAZY[name]}"), name)
