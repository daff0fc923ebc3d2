"""Causal attention with grouped queries, sliding windows and soft-capped scores."""

from ridgeline.kernels.attention.reference import AttentionSpec, attention

__all__ = ["AttentionSpec", "attention"]
