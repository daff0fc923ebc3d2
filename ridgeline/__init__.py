"""Ridgeline takes a language model to its hardware's limit and proves how close it got.

Public names are loaded on first use, so that `import ridgeline` and `ridgeline --help` are quick
and touch neither torch nor a GPU:

    import ridgeline
    path = ridgeline.resolve_model("demo")
    model, tokenizer = ridgeline.load_model(path), ridgeline.Tokenizer.load(path)
    prompt = tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}])
    print(ridgeline.generate(model, tokenizer, prompt).text)
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Engine": "ridgeline.engine",
    "Grammar": "ridgeline.engine",
    "Hardware": "ridgeline.hardware",
    "ModelConfig": "ridgeline.models",
    "Recipe": "ridgeline.recipe",
    "Record": "ridgeline.records",
    "Sampling": "ridgeline.engine",
    "SupervisedEngine": "ridgeline.engine",
    "Tokenizer": "ridgeline.data",
    "generate": "ridgeline.engine",
    "load_model": "ridgeline.quantization",
    "optimize": "ridgeline.ladder.modules",
    "profile": "ridgeline.profiling.modules",
    "resolve_model": "ridgeline.models.checkpoint",
    "save_model": "ridgeline.quantization",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
