"""The ladder for models outside our families: any nn.Module."""

from ridgeline.ladder.modules.optimized import OptimizedModule
from ridgeline.ladder.modules.run import optimize

__all__ = ["OptimizedModule", "optimize"]
