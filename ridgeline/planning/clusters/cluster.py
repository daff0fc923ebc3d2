"""`Cluster`: pools of equal GPUs, how each is built and joined, and what an hour of it costs.

Made by parsing.py from `8xH100` or a file; step models, memory plans and searches only read it.

    pool = parse_cluster("1024xH100@ib400").pools[0]
    pool.num_nodes, pool.gpu.memory_gb, pool.link_bytes_s, pool.network_bytes_s
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ridgeline.hardware.collective_curves import load_curves
from ridgeline.hardware.collectives import CollectiveCurve
from ridgeline.hardware.fabrics import NodeFabric
from ridgeline.hardware.facts import Hardware
from ridgeline.hardware.specs import GIGA, DeviceSpec

PCIE_ONE_WAY = 25e9  # bytes/s, where a datasheet has no PCIe: generation 4
RATE_KEYS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


@dataclass(frozen=True)
class GpuPool:
    """GPUs of one kind in nodes of one kind."""

    gpu: DeviceSpec
    num_gpus: int
    node: NodeFabric
    price_per_gpu_hour: float | None = None  # in the user's currency; None: no money is shown
    # Collectives of such GPUs as they were measured on this machine; others are modelled.
    curves: tuple[CollectiveCurve, ...] = field(default=(), repr=False)
    kind: Literal["cuda", "cpu"] = "cuda"  # what plans of memory and work are made for

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.node.num_gpus)

    @property
    def gpus_per_node(self) -> int:
        """Of the part of a node, where the pool is no more than that."""
        return min(self.num_gpus, self.node.num_gpus)

    @property
    def domain(self) -> int:
        """GPUs that the scale-up link joins; 1: there is PCIe alone."""
        if self.node.joint == "pcie":
            return self.gpus_per_node
        return min(self.num_gpus, self.node.domain)

    @property
    def memory_bytes(self) -> int:
        return int(self.gpu.memory_gb * GIGA)

    @property
    def link_bytes_s(self) -> float:
        """One way, of a GPU to all others of its domain together."""
        if self.node.joint != "pcie" and self.gpu.link_gb_s is not None:
            others = (self.domain - 1) / max(1, self.node.num_gpus - 1)
            used = others if self.node.joint == "mesh" else 1.0  # a link to each of them
            return self.gpu.link_gb_s / 2 * GIGA * used
        return PCIE_ONE_WAY if self.gpu.pcie_gb_s is None else self.gpu.pcie_gb_s / 2 * GIGA

    @property
    def network_bytes_s(self) -> float:
        """One way, of a GPU's share of its node's cards, above the first switches."""
        return self.node.network_bytes_s / self.node.num_gpus / self.node.oversubscription

    def rate(self, dtype: str) -> float | None:
        """FLOP/s of the datasheet; None where the GPU does not multiply in it."""
        assert dtype in RATE_KEYS, dtype
        value = getattr(self.gpu, dtype)
        return None if value is None else float(value) * 1e12

    @property
    def power_w(self) -> float:
        """At most, of all its nodes; a part of a node counts as that part."""
        return self.node.power_w * self.num_gpus / self.node.num_gpus

    @property
    def device_name(self) -> str:
        """As torch has it, and files of what was measured."""
        name = self.gpu.device_names[0] if self.gpu.device_names else self.gpu.name
        return name if self.kind == "cpu" or name.startswith("AMD") else f"NVIDIA {name}"

    def hardware(self) -> Hardware:
        """One of its GPUs by its datasheet, for whatever reads ceilings; nothing is measured."""
        vendor = "amd" if self.gpu.name.startswith("MI") else "nvidia"
        return Hardware(
            vendor=vendor,
            device_type="rocm" if vendor == "amd" else "cuda",
            device="cuda:0",
            name=self.gpu.device_names[0] if self.gpu.device_names else self.gpu.name,
            architecture="",
            memory_bytes=self.memory_bytes,
            num_units=self.gpu.num_units,
            driver="",
            datasheet=self.gpu.ceilings(),
            datasheet_source=self.gpu.source,
        )

    def words(self) -> str:
        """`1,024 x H100 SXM, 128 nodes (DGX H100), 8 x 400 Gbit/s a node`."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes:,} nodes"
        text = f"{self.num_gpus:,} x {self.gpu.name}, {nodes} ({self.node.name})"
        if self.num_nodes > 1:
            text += f", {self.node.nics} x {self.node.nic_gbit:g} Gbit/s a node"
            if self.node.oversubscription > 1:
                text += f", {self.node.oversubscription:g}:1 oversubscribed"
        return text


@dataclass(frozen=True)
class Cluster:
    """All there is to plan with."""

    name: str  # as it was given
    pools: tuple[GpuPool, ...]

    def __post_init__(self) -> None:
        assert self.pools, "a cluster has a pool"

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def power_w(self) -> float:
        return sum(pool.power_w for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        """Of all pools; None where one has no price."""
        total = 0.0
        for pool in self.pools:
            if pool.price_per_gpu_hour is None:
                return None
            total += pool.num_gpus * pool.price_per_gpu_hour
        return total

    def words(self) -> str:
        return "; ".join(pool.words() for pool in self.pools)


def with_curves(cluster: Cluster) -> Cluster:
    """With the collectives that were measured on this machine between such GPUs."""
    pools = (replace(pool, curves=load_curves(pool.device_name)) for pool in cluster.pools)
    return replace(cluster, pools=tuple(pools))
