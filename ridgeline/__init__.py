"""Ridgeline takes a language model to its hardware's limit and proves how close it got.

    import ridgeline

    engine = ridgeline.Engine("demo")
    for output in engine.generate(["The sky is", "Water is"], ridgeline.Sampling(max_tokens=32)):
        print(output.text)

Public names are imported on first use, so that `import ridgeline` and `ridgeline --help` are quick
and touch neither torch nor a GPU. Type checkers see the imports below; at run time `_MODULES` says
where each name lives, and a test holds the two lists together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    CorpusError,
    GrammarError,
    HardwareError,
    MissingPackageError,
    ModelNotFoundError,
    NumericsError,
    OfflineError,
    OptionError,
    OutOfMemoryError,
    OutputError,
    QualityError,
    RequestError,
    RidgelineError,
    UnsupportedError,
    UsageError,
    near_matches,
)
from ridgeline.version import __version__

if TYPE_CHECKING:
    from ridgeline.data.tokenizer import Tokenizer
    from ridgeline.data.workload import Workload
    from ridgeline.engine.engine import Engine
    from ridgeline.engine.naive import Generation, reference_generate
    from ridgeline.engine.requests.grammar import Grammar
    from ridgeline.engine.requests.request import Sampling
    from ridgeline.engine.requests.thinking import Thinking
    from ridgeline.engine.sampling.outputs import Completion, Delta, Output
    from ridgeline.hardware.facts import Hardware
    from ridgeline.ladder.modules import OptimizedModule, optimize
    from ridgeline.models.checkpoint import resolve_model
    from ridgeline.models.config import ModelConfig
    from ridgeline.profiling.modules import ModuleProfile, profile
    from ridgeline.quantization import load_model, save_model
    from ridgeline.recipe import KV, Limits, Parallel, Recipe, Speculation
    from ridgeline.records import Record
    from ridgeline.training.module_step import ModuleStep, ModuleStepResult, train_step

_MODULES = {
    "data.tokenizer": ("Tokenizer",),
    "data.workload": ("Workload",),
    "engine": (
        "Completion",
        "Delta",
        "Engine",
        "Generation",
        "Grammar",
        "Output",
        "Sampling",
        "Thinking",
        "reference_generate",
    ),
    "hardware.facts": ("Hardware",),
    "ladder.modules": ("OptimizedModule", "optimize"),
    "models.checkpoint": ("resolve_model",),
    "models.config": ("ModelConfig",),
    "profiling.modules": ("ModuleProfile", "profile"),
    "quantization": ("load_model", "save_model"),
    "recipe": ("KV", "Limits", "Parallel", "Recipe", "Speculation"),
    "records": ("Record",),
    "training.module_step": ("ModuleStep", "ModuleStepResult", "train_step"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "KV",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "CorpusError",
    "Delta",
    "Engine",
    "Generation",
    "Grammar",
    "GrammarError",
    "Hardware",
    "HardwareError",
    "Limits",
    "MissingPackageError",
    "ModelConfig",
    "ModelNotFoundError",
    "ModuleProfile",
    "ModuleStep",
    "ModuleStepResult",
    "NumericsError",
    "OfflineError",
    "OptimizedModule",
    "OptionError",
    "OutOfMemoryError",
    "Output",
    "OutputError",
    "Parallel",
    "QualityError",
    "Recipe",
    "Record",
    "RequestError",
    "RidgelineError",
    "Sampling",
    "Speculation",
    "Thinking",
    "Tokenizer",
    "UnsupportedError",
    "UsageError",
    "Workload",
    "__version__",
    "load_model",
    "optimize",
    "profile",
    "reference_generate",
    "resolve_model",
    "save_model",
    "train_step",
]


# Hidden from type checkers, which would otherwise take every unknown name for an Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            near = near_matches(name, __all__)
            raise AttributeError(f"module 'ridgeline' has no attribute {name!r}{near}")
        return getattr(import_module(f"ridgeline.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
