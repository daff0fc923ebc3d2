"""Where the time goes and what the machine allows: counted work over measured ceilings."""

from ridgeline.profiling.roofline import Limit, step_limit

__all__ = ["Limit", "step_limit"]
