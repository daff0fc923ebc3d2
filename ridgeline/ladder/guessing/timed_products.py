"""Products timed before anything is guessed: on a CPU codes may be slower than what they stand for,
and 16 bits no faster than 32, whatever their bytes promise. Each shape of the model's matrices is
timed in each dtype and scheme that a climb could change to, with the rows that its steps have; the
times stay in a file (engine/loading/layer_speed.py), where predictions find them and an engine that
starts with a scheme does not take them again.

    time_products(facts, start, filled, lengths)        # 3 s for `demo` on two cores
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.kernels import host_library
from ridgeline.ladder.guessing.first_guess import expected_situation
from ridgeline.ladder.rungs import MOVES, ClimbFacts, Offer, RungContext
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.profiling.predicting.expected_steps import Lengths
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import MatrixSize, head_matrix, model_matrices
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)

LIMIT_S = 4.0  # no product is begun later; what is not timed by then is predicted from its bytes


class TimedProduct(NamedTuple):
    dtype: str
    scheme: str
    shape: MatrixSize
    rows: tuple[int, ...]
    chance: float  # that it is kept


def time_products(
    facts: ClimbFacts,
    start: ClimbState,
    filled: Recipe,
    lengths: Lengths,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Nothing on a GPU, where bytes and FLOPs say enough, and where there are no kernels of ours;
    `start` has run, so that they are built.
    """
    if not facts.on_cpu or filled.kernels != "fused" or not host_library.prepare():
        return
    began = clock()
    for product in wanted_products(facts, start, filled, lengths):
        if clock() - began > LIMIT_S:
            log.info("no time to time all products; the rest is predicted from bytes")
            return
        measured_choices(
            [product.shape],
            parse_scheme(product.scheme),
            product.rows,
            parse_dtype(product.dtype),
            facts.hardware.device,
        )


def wanted_products(
    facts: ClimbFacts, start: ClimbState, filled: Recipe, lengths: Lengths
) -> list[TimedProduct]:
    """With the rows of decode steps, and of prompts where it may be guessed; those of the likeliest
    changes first. Of schemes with weights of the same bits one that fits is timed: the others are
    as fast (layer_speed.py).
    """
    situation = expected_situation(facts, start, filled, lengths)
    works = [phase.work for phase in situation.phases]
    tokens = tuple(sorted({max(1, round(work.tokens)) for work in works}))
    logits = tuple(sorted({max(1, round(work.logit_rows)) for work in works}))
    shapes, head = list(dict.fromkeys(model_matrices(facts.config))), head_matrix(facts.config)
    result: dict[tuple[str, str, MatrixSize], TimedProduct] = {}
    for dtype, field, name, chance in _changes(facts, start, filled):
        scheme, rows = parse_scheme(name), logits if field == "head" else tokens
        for shape in [head] if field == "head" else shapes:
            if scheme.fits(*shape):
                some = rows if chance == 1.0 else rows[:1]
                product = TimedProduct(dtype, name, shape, some, chance)
                result.setdefault((dtype, scheme.weight, shape), product)
    return sorted(result.values(), key=lambda one: -one.chance)


def _changes(
    facts: ClimbFacts, start: ClimbState, filled: Recipe
) -> Iterator[tuple[str, str, str, float]]:
    """A dtype, the field of a recipe that holds codes, their scheme and its chance."""
    dtypes = [filled.dtype]
    for rung in MOVES:
        offer = rung.offer(RungContext(facts, start, filled))
        dtypes += (
            [offer.edit["dtype"]] if isinstance(offer, Offer) and "dtype" in offer.edit else []
        )
    for dtype in dict.fromkeys(dtypes):
        state = applied(start, {"dtype": dtype})
        now = applied(ClimbState(filled, start.loop), {"dtype": dtype}).recipe
        for rung in MOVES:
            offer = rung.offer(RungContext(facts, state, now))
            edit = offer.edit if isinstance(offer, Offer) else {}
            for field in ("scheme", "head"):
                if edit.get(field) is not None:
                    yield dtype, field, edit[field], rung.chance
