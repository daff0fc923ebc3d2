"""Serving before it is bought: the engine's own scheduler, pages and router, driven through a
workload with the times that steps are predicted to take.
"""
