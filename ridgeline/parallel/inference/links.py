"""Links between processes, over torch.distributed: gloo between hosts, NCCL (on AMD RCCL) between
GPUs.

The process groups are this link's own and not torch's default one, which stays free for the program
around, and a second engine can have its own. A rank that has gone is an error of the device, in one
line: gloo notices the closed connection at once, NCCL does not, and is asked by `check`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from ridgeline.errors import HardwareError
from ridgeline.parallel.inference.group import Group, Reduction

dist: Any = distributed  # whose stubs name only half of what it has
c10d: Any = distributed_c10d

# Ranks wait for the next step as long as nobody asks for one. Gone ranks are noticed otherwise.
FOREVER = timedelta(days=365)
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

GONE_S = 2.0  # how long a rank whose connection is lost may take to have gone

Gone = Callable[[float], str | None]  # which rank has gone and how, if one does within so long


def nobody_knows(patience_s: float) -> str | None:
    """Of ranks that were not started from here."""
    return None


class ProcessLink:
    """`group` is a ProcessGroupGloo or a ProcessGroupNCCL."""

    def __init__(self, group: Any, rank: int, size: int, gone: Gone) -> None:
        self.rank, self.size = rank, size
        self._group, self._gone = group, gone
        self._is_whole = True  # no call was left in its middle

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = OPERATIONS[reduction]
        self._wait("allreduce", [tensor], _in_order(options))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = tensor.new_empty(self.size, *tensor.shape)
        options = _in_order(c10d.AllgatherOptions())
        self._wait("_allgather_base", parts.view(-1), tensor.view(-1), options)
        return list(parts)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait("broadcast", [tensor], _in_order(options))

    def send(self, tensor: Tensor, rank: int) -> None:
        self._wait("send", [tensor], rank, 0)

    def receive(self, tensor: Tensor, rank: int) -> None:
        self._wait("recv", [tensor], rank, 0)

    def _wait(self, name: str, *arguments: Any) -> None:
        """On a GPU only the stream waits."""
        was_whole, self._is_whole = self._is_whole, False
        try:
            work = getattr(self._group, name)(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            reason = self._gone(GONE_S) or str(error).splitlines()[0]
            raise HardwareError(f"tensor parallel has lost a rank: {reason}") from error
        self._is_whole = was_whole

    def check(self) -> None:
        reason = self._gone(0.0)
        if reason is not None:
            raise HardwareError(f"tensor parallel has lost a rank: {reason}")

    def close(self) -> None:
        """Without waiting for calls that are under way: their ranks may have gone.

        Where all have come back, gloo's threads are let end: one that was not given a core since
        holds a tensor of the last call, and letting go of it while Python ends aborts the process.
        """
        abort = getattr(self._group, "abort", None)
        if abort is not None and isinstance(self._group, getattr(dist, "ProcessGroupNCCL", ())):
            abort()
        elif self._is_whole:
            self._group = None


def _in_order(options: Any) -> Any:
    """NCCL then runs in the stream of the forward pass instead of beside it."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def join(
    store: Any,
    rank: int,
    size: int,
    device: str,
    local: bool,
    gone: Gone = nobody_knows,
    num_stages: int = 1,
) -> Group:
    """The group of all ranks that meet in `store`; `local` if they are all on this machine. The
    ranks of a stage follow each other.
    """
    try:
        return _joined(store, rank, size, device, local, gone, num_stages)
    except RuntimeError as error:
        reason = gone(GONE_S) or str(error).splitlines()[0]
        raise HardwareError(f"tensor parallel could not start: {reason}") from error


def _joined(
    store: Any, rank: int, size: int, device: str, local: bool, gone: Gone, num_stages: int
) -> Group:
    def link(name: str, rank: int, size: int) -> ProcessLink:
        if device == "cpu":
            return ProcessLink(_gloo(name, store, rank, size, local), rank, size, gone)
        return ProcessLink(_nccl(name, store, rank, size, device), rank, size, gone)

    control = ProcessLink(_gloo("control", store, rank, size, local), rank, size, gone)
    if num_stages == 1:
        return Group(link("data", rank, size), control)
    stage, place = divmod(rank, size // num_stages)
    data = link(f"data of stage {stage}", place, size // num_stages)
    return Group(data, control, link(f"ring of place {place}", stage, num_stages))


def _nccl(name: str, store: Any, rank: int, size: int, device: str) -> Any:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    group = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)
    group._set_sequence_number_for_group()
    group.eager_connect_single_device(torch.device(device))  # it cannot be in a capture
    return group


def _gloo(name: str, store: Any, rank: int, size: int, local: bool) -> Any:
    gloo = dist.ProcessGroupGloo
    own = dist.PrefixStore(name, store)
    if not local:  # over the device that torch chooses, or GLOO_SOCKET_IFNAME names
        return gloo(own, rank, size, FOREVER)
    options = gloo._Options()
    options._timeout = FOREVER
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # which nobody else reaches
    return gloo(own, rank, size, options)
