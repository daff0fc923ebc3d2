"""Profiles of models outside our families: any callable, any nn.Module."""

from ridgeline.profiling.modules.changes import Suggestion
from ridgeline.profiling.modules.result import ModuleProfile
from ridgeline.profiling.modules.rows import OpRow
from ridgeline.profiling.modules.run import profile

__all__ = ["ModuleProfile", "OpRow", "Suggestion", "profile"]
