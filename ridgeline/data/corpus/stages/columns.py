"""Changes some rows of a column of texts, and does not touch the others.

changed_where(texts, texts.str.contains("@", literal=True), scrub)
"""

from __future__ import annotations

from collections.abc import Callable

import polars


def changed_where(
    texts: polars.Series, mask: polars.Series, change: Callable[[polars.Series], polars.Series]
) -> polars.Series:
    if not mask.any():
        return texts
    kept, changed = texts.filter(~mask), change(texts.filter(mask))
    places = polars.concat([mask.not_().arg_true(), mask.arg_true()])
    return polars.concat([kept, changed.alias(kept.name)]).gather(places.arg_sort())
