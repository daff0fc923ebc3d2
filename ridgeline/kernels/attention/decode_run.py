"""How decode attention is to be run, where a caller has a say in it.

decode_attention(q, pages, tables, spec, DecodeRun(split_tokens=512))
"""

from __future__ import annotations

from typing import Any, NamedTuple


class DecodeRun(NamedTuple):
    # Tokens a split. With it given, a sequence's result is the same bits whatever else is in the
    # batch; without it, splits are cut so that the chip is full.
    split_tokens: int | None = None
    # Whether the kernel may read all but the queries (or the projection) and each sequence's newest
    # token before the kernel in front of it has ended: right in a decode step, where that one
    # writes nothing else.
    settled: bool = False
    config: Any = None  # which kernel, and how its work is cut; None: as measured, else by size


PLAIN = DecodeRun()
