"""The ranks of a run on the machines of a Ray cluster. Ray finds a place for an actor on each node;
the actor starts the ranks there and looks after them as it is done on one machine (supervisor.py).
On the first node all ranks meet, and are watched.

    main(RayOrder(words=["-m", "ridgeline", "train", …], out="run", nodes=2, devices=8, …))

Ranks end with their actor, and actors with the process that asked for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

from ridgeline.errors import HardwareError, RidgelineError
from ridgeline.parallel.starting.child import child_environment, local_store
from ridgeline.parallel.starting.endings import Ending
from ridgeline.parallel.starting.order import threads_each
from ridgeline.parallel.starting.ray_cluster import lacking, load_ray, start_ray
from ridgeline.parallel.starting.supervisor import (
    LOGS,
    RankOrder,
    RankSupervisor,
    with_restarts,
)

dist: Any = distributed  # whose stubs name only half of what it has

PLACE_S = 300.0  # for nodes that are busy now
SETTLE_S = 2.0  # after the end of one node's ranks, for the others'
CONFIG_NAME = "train.json"  # is there once a run has begun


@dataclass(frozen=True)
class RayOrder:
    words: Sequence[str]  # behind `python`
    out: str  # the run's folder, which all nodes see
    nodes: int
    devices: int  # on each node
    on_gpus: bool
    restarts: int = 0
    hang_after: float | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """What a node's ranks take."""
        needs = {"CPU": float(self.devices)}
        return needs | ({"GPU": float(self.devices)} if self.on_gpus else {})

    def for_node(self, node: int, address: str, restarts: int) -> RankOrder:
        has_begun = (Path(self.out) / CONFIG_NAME).is_file()
        return RankOrder(
            words=[*self.words, *(["--resume"] if has_begun else [])],
            size=self.nodes * self.devices,
            local_size=self.devices,
            logs=Path(self.out) / LOGS,
            num_threads=1,  # each node has its own cores: `NodeRanks.run`
            node=node,
            address=address,
            restarts=restarts,
            max_restarts=self.restarts,
        )


class NodeRanks:
    """The actor of a node."""

    def __init__(self) -> None:
        self._store: Any = None

    def meet(self, is_alone: bool) -> tuple[str, int]:
        """Open the store of all ranks here."""
        if is_alone:
            self._store = local_store()
            return "127.0.0.1", self._store.port
        address = load_ray().util.get_node_ip_address()
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def run(self, order: RankOrder, port: int, hang_after: float | None) -> Ending:
        os.environ["OMP_NUM_THREADS"] = str(threads_each(order.local_size))  # Ray sets its own
        try:
            return RankSupervisor(order, self._store, port, hang_after).run()
        except RidgelineError as error:
            return Ending(error.exit_code, str(error))


def main(order: RayOrder) -> int:
    """The exit code of a run, whose error has been shown in one line."""
    try:
        ending = run_on_ray(order)
    except RidgelineError as error:
        ending = Ending(error.exit_code, str(error))
    if ending.message is not None:
        print(f"ridgeline: error: {ending.message}", file=sys.stderr)
    return ending.code


def run_on_ray(order: RayOrder) -> Ending:
    start_ray(shows_output=True)
    wanted = {name: number * order.nodes for name, number in order.bundle.items()}
    reason = lacking(wanted)
    if reason is not None:
        raise HardwareError(
            f"{order.nodes} × {order.devices} ranks need {reason}; give a smaller layout, or add "
            "machines"
        )

    def show(why: str, number: int) -> None:
        print(f"ridgeline: {why}; start {number + 1} of {order.restarts + 1}", file=sys.stderr)

    return with_restarts(lambda restarts: _start(order, restarts), order.restarts, show)


def _start(order: RayOrder, restarts: int) -> Ending:
    ray = load_ray()
    group = ray.util.placement_group(
        [order.bundle] * order.nodes, strategy="STRICT_SPREAD" if order.nodes > 1 else "PACK"
    )
    actors: list[Any] = []
    try:
        if not group.wait(PLACE_S):
            raise HardwareError(
                f"Ray found no {order.nodes} nodes with {order.bundle} free within {PLACE_S:.0f} s"
            )
        for node in range(order.nodes):
            actors.append(_actor(ray, order, group, node))
        address, port = ray.get(actors[0].meet.remote(order.nodes == 1))
        runs = [
            actor.run.remote(order.for_node(node, address, restarts), port, order.hang_after)
            for node, actor in enumerate(actors)
        ]
        return _ended(ray, runs)
    except ray.exceptions.RayError as error:
        return _lost(error)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _actor(ray: Any, order: RayOrder, group: Any, node: int) -> Any:
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=node
    )
    options = {
        "num_cpus": order.bundle["CPU"],
        "num_gpus": order.bundle.get("GPU", 0.0),
        "scheduling_strategy": place,
        "runtime_env": {"env_vars": {"PYTHONPATH": child_environment()["PYTHONPATH"]}},
    }
    return ray.remote(**options)(NodeRanks).remote()


def _ended(ray: Any, runs: list[Any]) -> Ending:
    """Of all nodes: the first that fails ends the others."""
    left = runs
    endings: list[Ending] = []
    while left:
        timeout = SETTLE_S if any(ending.code for ending in endings) else None
        done, left = ray.wait(left, num_returns=1, timeout=timeout)
        if not done:
            break
        endings += [_ending(ray, run) for run in done]
    failed = [ending for ending in endings if ending.code]
    return min(failed, key=lambda ending: ending.order) if failed else Ending(0)


def _ending(ray: Any, run: Any) -> Ending:
    try:
        ending: Ending = ray.get(run)
    except ray.exceptions.RayError as error:  # the actor, its machine or the cluster is gone
        ending = _lost(error)
    return ending


def _lost(error: Exception) -> Ending:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = f"a node of the run is gone: {lines[0] if lines else repr(error)}"
    return Ending(HardwareError.exit_code, message, may_restart=True, order=(False, 0.0))
