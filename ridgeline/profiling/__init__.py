"""Where the time goes and what the machine allows: counted work over measured ceilings."""

from ridgeline.profiling.roofline import Limit, Roof, roof_of, step_limit

__all__ = ["Limit", "Roof", "roof_of", "step_limit"]
