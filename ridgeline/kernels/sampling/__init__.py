"""Choosing the next token from logits: greedy, or a seeded draw from the filtered distribution."""

from ridgeline.kernels.sampling.reference import filtered_logits, gumbel_noise, sample

__all__ = ["filtered_logits", "gumbel_noise", "sample"]
