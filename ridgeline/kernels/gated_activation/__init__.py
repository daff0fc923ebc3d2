"""SwiGLU and GeGLU: the gate half of a row, activated, times its up half."""

from ridgeline.kernels.gated_activation.reference import Activation, gated_activation

__all__ = ["Activation", "gated_activation"]
