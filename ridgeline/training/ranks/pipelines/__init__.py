"""Stages of a model, and the passes of a step over them."""
