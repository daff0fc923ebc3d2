"""Profiles of models outside our families: any callable, any nn.Module."""

from ridgeline.profiling.modules.found import ModuleProfile, Row, Suggestion
from ridgeline.profiling.modules.run import profile

__all__ = ["ModuleProfile", "Row", "Suggestion", "profile"]
