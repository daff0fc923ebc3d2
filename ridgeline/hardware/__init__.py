"""The machine: what a device is, what its datasheet promises, and what it was measured to do."""

from ridgeline.hardware.ceilings import load_cached, measure
from ridgeline.hardware.detection import detect
from ridgeline.hardware.facts import Ceiling, Hardware

__all__ = ["Ceiling", "Hardware", "detect", "load_cached", "measure"]
