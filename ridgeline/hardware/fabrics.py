"""How GPUs are put together: nodes with their scale-up links and network cards, and systems of many
nodes, each with the document it comes from. What one GPU is stands in specs.py.

Rates of cards are one way, in Gbit/s as vendors print them; power is a whole node's at most, with
fans and processors.

    usual_node("H100 SXM").nics         # 8
    SYSTEMS["superpod-h100"].num_nodes  # 32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Joint = Literal["switch", "mesh", "pairs", "pcie"]
GBIT = 1e9 / 8  # bytes/s


@dataclass(frozen=True)
class NodeFabric:
    """One node, and how it is joined to others."""

    name: str
    num_gpus: int
    joint: Joint  # a switch, each to each, pairs of bridges, or PCIe alone
    domain: int  # GPUs that the scale-up link joins, beyond the node in racks
    nics: int  # network cards of the node for traffic between GPUs; 0: it stands alone
    nic_gbit: float  # of each, one way
    power_w: float  # of the node, at most
    host_memory_gb: float
    source: str
    # How much less the network above the first switches carries than all cards together.
    oversubscription: float = 1.0

    @property
    def network_bytes_s(self) -> float:
        """Of all cards of the node, one way."""
        return self.nics * self.nic_gbit * GBIT


@dataclass(frozen=True)
class System:
    """What is sold by the node or by the hundred of nodes."""

    gpu: str  # of specs.py
    num_nodes: int
    words: str


_DOCS = "https://docs.nvidia.com/dgx"
_SXM = "DGX user guide, " + _DOCS
DGX_A100 = NodeFabric("DGX A100", 8, "switch", 8, 8, 200, 6500, 2048, f"{_SXM}/dgxa100-user-guide/")
DGX_H100 = NodeFabric(
    "DGX H100", 8, "switch", 8, 8, 400, 10200, 2048, f"{_SXM}/dgxh100-user-guide/"
)
DGX_H200 = NodeFabric(
    "DGX H200", 8, "switch", 8, 8, 400, 10200, 2048, f"{_SXM}/dgxh100-user-guide/"
)
DGX_B200 = NodeFabric(
    "DGX B200", 8, "switch", 8, 8, 400, 14300, 2048, f"{_SXM}/dgxb200-user-guide/"
)
DGX_B300 = NodeFabric(
    "DGX B300", 8, "switch", 8, 8, 800, 15500, 2048, f"{_SXM}/dgxb300-user-guide/"
)
# A tray of four; 72 in a rack are one domain. Power is a rack's share: 120 and 132 kW by 18.
NVL72_GB200 = NodeFabric(
    "GB200 NVL72 tray", 4, "switch", 72, 4, 400, 6667, 960,
    "GB200 NVL72 specifications, https://www.nvidia.com/gb200-nvl72/",
)  # fmt: skip
NVL72_GB300 = NodeFabric(
    "GB300 NVL72 tray", 4, "switch", 72, 4, 800, 7333, 960,
    "GB300 NVL72 specifications, https://www.nvidia.com/gb300-nvl72/",
)  # fmt: skip
_AMD = "AMD Instinct cluster reference guide, https://instinct.docs.amd.com/"
MI300X = NodeFabric("8 x MI300X", 8, "mesh", 8, 8, 400, 10400, 2304, _AMD)
MI325X = NodeFabric("8 x MI325X", 8, "mesh", 8, 8, 400, 12400, 2304, _AMD)
MI355X = NodeFabric("8 x MI355X", 8, "mesh", 8, 8, 400, 16500, 3072, _AMD)
MI200 = NodeFabric("4 x MI250X", 8, "mesh", 8, 4, 200, 3400, 512, _AMD)
_USUAL = "no datasheet: a usual server of PCIe cards"
PCIE = NodeFabric("PCIe server", 8, "pcie", 8, 2, 200, 4500, 1024, _USUAL)
BRIDGED = NodeFabric("PCIe server, bridges in pairs", 8, "pairs", 2, 2, 200, 4500, 1024, _USUAL)

# By the GPU's name in specs.py; others have PCIe.
USUAL_NODES = {
    "A100 SXM 40GB": DGX_A100,
    "A100 SXM 80GB": DGX_A100,
    "H100 SXM": DGX_H100,
    "H200": DGX_H200,
    "B200": DGX_B200,
    "B300": DGX_B300,
    "GB200": NVL72_GB200,
    "GB300": NVL72_GB300,
    "MI300X": MI300X,
    "MI325X": MI325X,
    "MI355X": MI355X,
    "MI250X die": MI200,
    "A100 PCIe 40GB": BRIDGED,
    "A100 PCIe 80GB": BRIDGED,
    "H100 PCIe": BRIDGED,
    "H100 NVL": BRIDGED,
    "RTX 3090": BRIDGED,
}

# NVIDIA's reference architectures. A SuperPOD is counted by its scalable unit.
_UNIT = "a scalable unit of a DGX SuperPOD"
SYSTEMS = {
    "dgx-a100": System("A100 SXM 80GB", 1, "DGX A100"),
    "dgx-h100": System("H100 SXM", 1, "DGX H100"),
    "dgx-h200": System("H200", 1, "DGX H200"),
    "dgx-b200": System("B200", 1, "DGX B200"),
    "dgx-b300": System("B300", 1, "DGX B300"),
    "gb200-nvl72": System("GB200", 18, "a GB200 NVL72 rack"),
    "gb300-nvl72": System("GB300", 18, "a GB300 NVL72 rack"),
    "superpod": System("H100 SXM", 32, f"{_UNIT}: 32 DGX H100"),
    "superpod-a100": System("A100 SXM 80GB", 20, f"{_UNIT}: 20 DGX A100"),
    "superpod-h100": System("H100 SXM", 32, f"{_UNIT}: 32 DGX H100"),
    "superpod-h200": System("H200", 32, f"{_UNIT}: 32 DGX H200"),
    "superpod-b200": System("B200", 32, f"{_UNIT}: 32 DGX B200"),
    "superpod-gb200": System("GB200", 144, f"{_UNIT}: 8 racks of GB200 NVL72"),
}


def usual_node(gpu: str) -> NodeFabric:
    """That most machines with this GPU are built as."""
    return USUAL_NODES.get(gpu, PCIE)
