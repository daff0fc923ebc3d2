"""Flags from the fields of dataclasses, and the parser that shows them."""
