"""Profiles of models outside our families: any callable, any nn.Module."""

from ridgeline.profiling.modules.found import ModuleProfile, OpRow, Suggestion
from ridgeline.profiling.modules.run import profile

__all__ = ["ModuleProfile", "OpRow", "Suggestion", "profile"]
