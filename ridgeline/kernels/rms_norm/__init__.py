"""RMSNorm: scale each row to unit root-mean-square, then by a learned weight."""

from ridgeline.kernels.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
