"""Measurements against ceilings and peers, in one run."""
