"""Mixture of experts: each token goes through its few best experts, weighted by the router."""

from ridgeline.kernels.moe.reference import mixture_of_experts, route

__all__ = ["mixture_of_experts", "route"]
