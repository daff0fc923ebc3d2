"""Clusters from what people type: `8xH100`, `1024xH100@ib400`, `DGX-H200`, `2xSuperPOD`, pools
joined by `+`, or a file (files.py).

Behind `@` stands the network: `ib400` or `roce200` is one card of so many Gbit/s for each GPU,
`ib400x4` four of them for a node, `ib400/2` half of what the cards carry above the first switches,
`none` nodes that are not joined. Without it a GPU has the node that it is usually built into.
`here` is this machine (here.py).

    parse_cluster("512xH100+256xA100").pools
    parse_cluster("cluster.toml")
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ridgeline.errors import UsageError, near_matches
from ridgeline.hardware.fabrics import SYSTEMS, NodeFabric, usual_node
from ridgeline.hardware.specs import SPECS, DeviceSpec
from ridgeline.planning.clusters.cluster import Cluster, GpuPool
from ridgeline.planning.clusters.files import load_cluster
from ridgeline.planning.clusters.here import this_machine

# What people say, and the row of specs.py that is meant.
SHORT_NAMES = {
    "a100": "A100 SXM 80GB",
    "a100-80gb": "A100 SXM 80GB",
    "a100-40gb": "A100 SXM 40GB",
    "a100-pcie": "A100 PCIe 80GB",
    "h100": "H100 SXM",
    "mi250x": "MI250X die",
    "4090": "RTX 4090",
    "5090": "RTX 5090",
    "3090": "RTX 3090",
}
PART = re.compile(r"(?:(?P<count>[-\d.,_]+)\s*x\s*)?(?P<name>[^@]+?)(?:@(?P<network>.+))?", re.I)
NETWORK = re.compile(r"(?:ib|roce|eth|efa)(?P<gbit>\d+)(?:x(?P<nics>\d+))?(?:/(?P<over>[\d.]+))?")
MOST_GPUS = 1_000_000
HERE = "here"
EXAMPLES = "8xH100, 1024xH100@ib400, DGX-H200, 2xSuperPOD, here or a .toml file"


def parse_cluster(text: str) -> Cluster:
    """UsageError where a GPU is unknown, a count is no positive whole number, or nodes are cut."""
    text = text.strip()
    if text.endswith((".toml", ".json")):
        return load_cluster(Path(text), gpu_named)
    if not text:
        raise UsageError(f"--gpus is empty; give e.g. {EXAMPLES}")
    return Cluster(text, tuple(_pool(part.strip()) for part in text.split("+")))


def _pool(part: str) -> GpuPool:
    match = PART.fullmatch(part)
    if match is None:
        raise UsageError(f"--gpus has {part!r}; give e.g. {EXAMPLES}")
    name, count = match["name"].strip(), _count(match["count"], part)
    if name.lower() == HERE:
        return this_machine(None if match["count"] is None else count)
    system = SYSTEMS.get(name.lower().replace(" ", "-"))
    if system is not None:
        gpu = _row(system.gpu)
        node = usual_node(gpu.name)
        num_gpus = count * system.num_nodes * node.num_gpus
    else:
        gpu = gpu_named(name)
        node, num_gpus = usual_node(gpu.name), count
    if match["network"] is not None:
        node = _with_network(node, match["network"].strip().lower())
    return make_pool(GpuPool(gpu, num_gpus, node))


def make_pool(pool: GpuPool) -> GpuPool:
    """The same, where it can be built: several nodes are whole ones."""
    size = pool.node.num_gpus
    if pool.num_gpus > MOST_GPUS:
        raise UsageError(f"{pool.num_gpus:,} GPUs are more than {MOST_GPUS:,}")
    if pool.num_gpus > size and pool.num_gpus % size:
        below = pool.num_gpus // size * size
        raise UsageError(
            f"{pool.num_gpus} x {pool.gpu.name} are {pool.num_gpus / size:g} nodes of {size}; "
            f"give {below} or {below + size}, or a file with gpus_per_node"
        )
    if pool.num_gpus > size and not pool.node.nics:
        raise UsageError(
            f"{pool.num_gpus} x {pool.gpu.name} are several nodes, and @none joins none; "
            f"give at most {size}"
        )
    return pool


def _count(text: str | None, part: str) -> int:
    if text is None:
        return 1
    text = text.strip().replace(",", "").replace("_", "")
    try:
        count = int(text)
    except ValueError:
        raise UsageError(
            f"--gpus {part}: {text!r} is no whole number of GPUs; give e.g. {EXAMPLES}"
        ) from None
    if count < 1:
        raise UsageError(f"--gpus {part}: {count} GPUs; give at least 1, e.g. {EXAMPLES}")
    return count


def gpu_named(name: str) -> DeviceSpec:
    """By its row's name, the one torch has, or what people say; without a near guess."""
    wanted = _plain(name)
    for spec in SPECS:
        if wanted in {_plain(each) for each in (spec.name, *spec.device_names)}:
            return spec
    short = SHORT_NAMES.get(name.strip().lower().replace(" ", "-"))
    if short is not None:
        return _row(short)
    known = [*SHORT_NAMES, *(spec.name for spec in SPECS), *SYSTEMS]
    raise UsageError(
        f"the GPU {name!r} is unknown{near_matches(name, known)}; `ridgeline hardware --list` has "
        "the known ones. For another give its ceilings in a file: --gpus cluster.toml with "
        "memory_gb, bandwidth_gb_s, power_w and bf16 (docs/planning.md)"
    )


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return " ".join(words[1:] if words[:1] == ["nvidia"] else words)


def _row(name: str) -> DeviceSpec:
    return next(spec for spec in SPECS if spec.name == name)


def _with_network(node: NodeFabric, text: str) -> NodeFabric:
    if text == "none":
        return replace(node, nics=0, nic_gbit=0.0)
    match = NETWORK.fullmatch(text)
    if match is None:
        raise UsageError(
            f"the network {text!r} is not understood; give e.g. ib400, roce200x4 (cards of a node) "
            "or ib400/2 (oversubscribed 2:1)"
        )
    gbit, over = float(match["gbit"]), _number(match["over"], text)
    nics = int(match["nics"]) if match["nics"] else node.num_gpus
    if gbit <= 0 or nics < 1 or over < 1:
        raise UsageError(f"the network {text!r} carries nothing; give e.g. ib400 or ib400/2")
    return replace(node, nics=nics, nic_gbit=gbit, oversubscription=over)


def _number(text: str | None, network: str) -> float:
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        raise UsageError(f"the network {network!r} is not understood; give e.g. ib400/2") from None
