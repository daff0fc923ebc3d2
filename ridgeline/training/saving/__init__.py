"""Checkpoints: their files, and the thread that writes them beside the running step."""
