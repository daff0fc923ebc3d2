"""The definition of 8-bit codes of rows is formats/scaling.py's; here it is under the op's name."""

from __future__ import annotations

from ridgeline.formats.scaling import quantize_rows

__all__ = ["quantize_rows"]
