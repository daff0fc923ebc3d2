"""Rungs for data: whether a filter is kept, by what small models learn with it and without it."""
