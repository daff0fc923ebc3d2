"""Work that every rank does, and that either all have done or none: where it fails on one rank, all
of them raise the same error, so that none waits for one that has given up.

    folders = together(mesh.control, make_folder)      # what each rank's call returned

It goes over the hosts. A thread that calls it beside a running step needs a group of its own
(`host_group`): collectives of one group have to come in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from ridgeline.errors import HardwareError, RidgelineError
from ridgeline.parallel.mesh import STEP_S, Axis, Mesh

dist: Any = distributed
Result = TypeVar("Result")


def host_group(mesh: Mesh, patience_s: float = STEP_S) -> Axis | None:
    """One more group of all ranks; every rank calls it. None: this rank is alone."""
    if mesh.layout.is_single:
        return None
    ranks = range(mesh.layout.size)
    group = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=patience_s))
    return Axis("all", ranks, mesh.rank, group)


def together(hosts: Axis | None, work: Callable[[], Result]) -> list[Result]:
    """What `work` returned on each rank; it is pickled. A user's error is raised alike on every
    rank: the first rank's that had one. Any other stays what it is on its rank, and is a
    HardwareError on the others.
    """
    if hosts is None:
        return [work()]
    result, own = None, None
    try:
        result = work()
    except Exception as error:
        own = error
    outcomes = _gathered(hosts, (result, None if own is None else _plain(own)))
    errors = [error for _, error in outcomes]
    if not any(errors):
        return [result for result, _ in outcomes]
    if own is not None and not isinstance(own, RidgelineError):
        raise own
    rank, failed = next((rank, error) for rank, error in enumerate(errors) if error is not None)
    if len({str(error) for error in errors}) == 1:
        raise failed from own
    raise type(failed)(f"{failed} (rank {rank} of {hosts.size})") from own


def _plain(error: Exception) -> RidgelineError:
    """With its words alone: an error may hold what cannot be sent."""
    if isinstance(error, RidgelineError):
        return type(error)(str(error))
    return HardwareError(f"{type(error).__name__}: {error}")


def _gathered(hosts: Axis, own: Any) -> list[Any]:
    outcomes: list[Any] = [None] * hosts.size
    with lost_ranks():
        dist.all_gather_object(outcomes, own, group=hosts.group)
    return outcomes


@contextmanager
def lost_ranks() -> Iterator[None]:
    """What torch says of a rank that has gone, as a HardwareError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RidgelineError):
            raise
        reason = str(error).splitlines()[0]
        raise HardwareError(f"another rank has gone: {reason}") from error
