"""A cluster in a file of one's own, TOML or JSON: GPUs that are known or given by their figures,
nodes, the network, prices.

    name = "ours"
    [[pool]]
    gpu = "H100"                # a known one; or its figures in [pool.figures]
    count = 64
    gpus_per_node = 4
    nics_per_node = 4
    nic_gbit = 200
    price_per_gpu_hour = 2.4

    load_cluster(Path("cluster.toml"), gpu_named)
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ridgeline.errors import UsageError
from ridgeline.formats.files import reject_unknown_keys
from ridgeline.hardware.fabrics import Joint, NodeFabric, usual_node
from ridgeline.hardware.specs import DeviceSpec
from ridgeline.planning.clusters.cluster import Cluster, GpuPool

POOL_KEYS = ("gpu", "count", "gpus_per_node", "joint", "domain", "nics_per_node", "nic_gbit",
             "oversubscription", "node_power_w", "host_memory_gb", "price_per_gpu_hour",
             "figures")  # fmt: skip
NEEDED_FIGURES = ("memory_gb", "bandwidth_gb_s", "power_w", "bf16")
FIGURES = (*NEEDED_FIGURES, "fp32", "tf32", "fp16", "fp8", "fp4", "int8", "link_gb_s", "pcie_gb_s",
           "num_units")  # fmt: skip
PriceTable = Mapping[str, float]


def load_cluster(path: Path, gpu_named: Callable[[str], DeviceSpec]) -> Cluster:
    values = read_table(path)
    reject_unknown_keys(values, ("name", "pool"), str(path))
    pools = values.get("pool")
    pools = [pools] if isinstance(pools, Mapping) else pools
    if not isinstance(pools, list) or not pools:
        raise UsageError(f"{path} has no pool; give at least one [[pool]] with gpu and count")
    made = tuple(_pool(each, f"{path}: pool {n}", gpu_named) for n, each in enumerate(pools, 1))
    return Cluster(str(values.get("name", path.stem)), made)


def load_prices(path: Path) -> PriceTable:
    """`"H100" = 2.4`: of a GPU-hour, by the name that the cluster was given with."""
    values = read_table(path)
    return {name: _positive(value, f"{path}: {name}") for name, value in values.items()}


def with_prices(
    cluster: Cluster, prices: PriceTable, gpu_named: Callable[[str], DeviceSpec]
) -> Cluster:
    by_gpu = {gpu_named(name).name: price for name, price in prices.items()}
    priced = (
        replace(pool, price_per_gpu_hour=by_gpu.get(pool.gpu.name, pool.price_per_gpu_hour))
        for pool in cluster.pools
    )
    return replace(cluster, pools=tuple(priced))


def read_table(path: Path) -> dict[str, Any]:
    """Of a TOML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{path} is not {kind}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is no table; expected names with values")
    return values


def _pool(values: Any, origin: str, gpu_named: Callable[[str], DeviceSpec]) -> GpuPool:
    if not isinstance(values, Mapping):
        raise UsageError(f"{origin} is {values!r}; expected a table with gpu and count")
    reject_unknown_keys(values, POOL_KEYS, origin)
    name = values.get("gpu")
    if not isinstance(name, str):
        raise UsageError(f"{origin} has no gpu; give its name")
    gpu = _own_gpu(name, values["figures"], origin) if "figures" in values else gpu_named(name)
    count = _whole(values.get("count"), f"{origin}: count")
    node = _node(values, origin, usual_node(gpu.name))
    if count > node.num_gpus and count % node.num_gpus:
        raise UsageError(
            f"{origin}: count is {count}, which is no multiple of the {node.num_gpus} GPUs of a "
            "node; change count or gpus_per_node"
        )
    if count > node.num_gpus and not node.nics:
        raise UsageError(f"{origin}: several nodes without cards; give nics_per_node")
    price = values.get("price_per_gpu_hour")
    if price is not None:
        price = _positive(price, f"{origin}: price_per_gpu_hour")
    return GpuPool(gpu, count, node, price)


def _node(values: Mapping[str, Any], origin: str, usual: NodeFabric) -> NodeFabric:
    """The usual one with what is given in its place."""
    size = _whole(values.get("gpus_per_node", usual.num_gpus), f"{origin}: gpus_per_node")
    joint = values.get("joint", usual.joint)
    if joint not in get_args(Joint):
        raise UsageError(f"{origin}: joint is {joint!r}; give one of {', '.join(get_args(Joint))}")
    scale = size / usual.num_gpus
    domain = usual.domain if usual.domain > usual.num_gpus else min(size, usual.domain)

    def number(key: str, default: float) -> float:
        return _positive(values.get(key, default), f"{origin}: {key}")

    over = number("oversubscription", usual.oversubscription)
    if over < 1:
        raise UsageError(f"{origin}: oversubscription is {over:g}; give 1 (none) or more")
    return replace(
        usual,
        name=usual.name if set(values) <= {"gpu", "count", "price_per_gpu_hour"} else "own node",
        num_gpus=size,
        joint=joint,
        domain=_whole(values.get("domain", max(domain, 1)), f"{origin}: domain"),
        nics=_whole(
            values.get("nics_per_node", max(1, round(usual.nics * scale))),
            f"{origin}: nics_per_node",
            least=0,
        ),
        nic_gbit=number("nic_gbit", usual.nic_gbit),
        power_w=number("node_power_w", usual.power_w * scale),
        host_memory_gb=number("host_memory_gb", usual.host_memory_gb * scale),
        oversubscription=over,
    )


def _own_gpu(name: str, figures: Any, origin: str) -> DeviceSpec:
    """From its ceilings, as the user has them; what is not given it cannot do."""
    if not isinstance(figures, Mapping):
        raise UsageError(f"{origin}: figures are no table; give {', '.join(NEEDED_FIGURES)}")
    reject_unknown_keys(figures, FIGURES, f"{origin}: figures")
    missing = [key for key in NEEDED_FIGURES if key not in figures]
    if missing:
        raise UsageError(f"{origin}: figures lack {', '.join(missing)}")
    known = {key: _positive(value, f"{origin}: {key}") for key, value in figures.items()}
    return DeviceSpec(
        name=name,
        device_names=(),
        num_units=int(known.get("num_units", 1)),
        memory_gb=known["memory_gb"],
        bandwidth_gb_s=known["bandwidth_gb_s"],
        power_w=known["power_w"],
        source=f"figures of {origin}",
        fp32=known.get("fp32", known["bf16"] / 16),
        tf32=known.get("tf32"),
        bf16=known["bf16"],
        fp16=known.get("fp16", known["bf16"]),
        fp8=known.get("fp8"),
        int8=known.get("int8"),
        link_gb_s=known.get("link_gb_s"),
        pcie_gb_s=known.get("pcie_gb_s"),
        fp4=known.get("fp4"),
    )


def _whole(value: Any, origin: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{origin} is {value!r}; give a whole number, {least} or more")
    return value


def _positive(value: Any, origin: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UsageError(f"{origin} is {value!r}; give a positive number")
    return float(value)
