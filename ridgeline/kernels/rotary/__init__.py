"""Rotary position embedding: turn pairs of a head's dims by angles that grow with position."""

from ridgeline.kernels.rotary.reference import rotate

__all__ = ["rotate"]
