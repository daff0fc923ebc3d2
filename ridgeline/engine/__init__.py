"""Running a model: what a request may ask for, the engine that runs many at once, and the plain
loop that defines the right answer.
"""

from ridgeline.engine.engine import Engine
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.naive import Generation, generate, generate_tokens
from ridgeline.engine.outputs import Completion, Delta, Output
from ridgeline.engine.request import Sampling
from ridgeline.engine.supervisor import SupervisedEngine

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Generation",
    "Grammar",
    "Output",
    "Sampling",
    "SupervisedEngine",
    "generate",
    "generate_tokens",
]
