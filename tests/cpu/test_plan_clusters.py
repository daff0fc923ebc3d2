"""Clusters as people type them and as files: every form, what it amounts to, and what is refused
with what would work.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.hardware.fabrics import SYSTEMS, USUAL_NODES
from ridgeline.hardware.specs import SPECS
from ridgeline.planning.clusters.files import load_prices, with_prices
from ridgeline.planning.clusters.parsing import gpu_named, parse_cluster

pytestmark = pytest.mark.smoke

FIGURES = {"memory_gb": 96, "bandwidth_gb_s": 4000, "power_w": 500, "bf16": 600}


@pytest.mark.parametrize(
    ("text", "num_gpus", "num_nodes", "domain"),
    [
        ("8xH100", 8, 1, 8),
        ("8 x H100", 8, 1, 8),
        ("H200", 1, 1, 1),
        ("1,024xH100@ib400", 1024, 128, 8),
        ("DGX-H200", 8, 1, 8),
        ("3xDGX-B200", 24, 3, 8),
        ("2xSuperPOD", 512, 64, 8),
        ("4xMI300X", 4, 1, 4),
        ("144xGB200", 144, 36, 72),
        ("GB300-NVL72", 72, 18, 72),
        ("8xNVIDIA A100-SXM4-40GB", 8, 1, 8),
        ("2x4090", 2, 1, 2),
    ],
)
def test_what_a_text_amounts_to(text: str, num_gpus: int, num_nodes: int, domain: int) -> None:
    (pool,) = parse_cluster(text).pools
    assert (pool.num_gpus, pool.num_nodes, pool.domain) == (num_gpus, num_nodes, domain)
    assert pool.gpu.name in pool.words()


def test_pools_are_joined() -> None:
    cluster = parse_cluster("512xH100+256xA100")
    assert [pool.gpu.name for pool in cluster.pools] == ["H100 SXM", "A100 SXM 80GB"]
    assert cluster.num_gpus == 768
    assert cluster.power_w == 64 * 10200 + 32 * 6500
    assert cluster.price_per_hour is None


def test_the_network_behind_the_at() -> None:
    assert parse_cluster("16xH100").pools[0].network_bytes_s == 50e9
    assert parse_cluster("16xH100@ib200").pools[0].network_bytes_s == 25e9
    assert parse_cluster("16xH100@roce400x4").pools[0].network_bytes_s == 25e9
    assert parse_cluster("16xH100@ib400/2").pools[0].network_bytes_s == 25e9
    assert parse_cluster("8xH100@none").pools[0].network_bytes_s == 0


def test_links_of_a_mesh_are_to_each_other_gpu() -> None:
    whole = parse_cluster("8xMI300X").pools[0].link_bytes_s
    assert whole == 448e9
    assert parse_cluster("4xMI300X").pools[0].link_bytes_s == pytest.approx(whole * 3 / 7)
    assert parse_cluster("8xL40S").pools[0].link_bytes_s == 32e9  # PCIe 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0xH100", "at least 1"),
        ("1.5xH100", "no whole number"),
        ("-3xH100", "at least 1"),
        ("12xH100", "give 8 or 16"),
        ("8xB9000", "give its ceilings in a file"),
        ("8xH10", "did you mean"),
        ("8xH100@fast", "is not understood"),
        ("16xH100@none", "at most 8"),
        ("8xH100@ib0", "carries nothing"),
        ("8xH100@ib400/0.5", "carries nothing"),
        ("8xH100@ib400/1.2.3", "is not understood"),
        ("", "is empty"),
        ("+", "give e.g."),
        ("99999999xH100", "more than"),
        ("nowhere.toml", "cannot read"),
    ],
)
def test_refusals_say_what_works(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_cluster(text)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'name = "ours"\n[[pool]]\ngpu = "H100"\ncount = 64\ngpus_per_node = 4\n'
        "nics_per_node = 2\nnic_gbit = 100\noversubscription = 2.0\nprice_per_gpu_hour = 2.5\n"
        '[[pool]]\ngpu = "X1"\ncount = 8\n[pool.figures]\n'
        + "".join(f"{key} = {value}\n" for key, value in FIGURES.items())
    )
    cluster = parse_cluster(str(path))
    ours, own = cluster.pools
    assert (cluster.name, ours.num_nodes, ours.domain) == ("ours", 16, 4)
    assert ours.network_bytes_s == 2 * 12.5e9 / 4 / 2
    assert ours.price_per_gpu_hour == 2.5
    assert own.rate("bf16") == 600e12
    assert own.rate("fp8") is None
    assert own.hardware().ceiling("memory_bandwidth").value == 4e12  # type: ignore[union-attr]
    assert cluster.price_per_hour is None  # one pool has none


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"gpu": "H100"}, "count is None"),
        ({"gpu": "H100", "count": 0}, "whole number"),
        ({"gpu": "H100", "count": 2.5}, "whole number"),
        ({"gpu": "H100", "count": 10}, "no multiple"),
        ({"count": 8}, "has no gpu"),
        ({"gpu": "H100", "count": 8, "color": 1}, "color"),
        ({"gpu": "H100", "count": 8, "nic_gbit": -1}, "positive number"),
        ({"gpu": "H100", "count": 8, "joint": "glue"}, "give one of"),
        ({"gpu": "H100", "count": 8, "oversubscription": 0.5}, "1 .none. or more"),
        ({"gpu": "X1", "count": 8, "figures": {"bf16": 600}}, "lack memory_gb"),
        ({"gpu": "X1", "count": 8, "figures": 3}, "no table"),
        ("H100", "expected a table"),
    ],
)
def test_wrong_files_are_refused(pool: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"pool": [pool]}))
    with pytest.raises(UsageError, match=words):
        parse_cluster(str(path))


def test_prices_are_the_users(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('"H100" = 2.0\n"A100-40GB" = 1\n')
    cluster = with_prices(parse_cluster("16xH100"), load_prices(path), gpu_named)
    assert cluster.price_per_hour == 32.0
    path.write_text('"H100" = "cheap"\n')
    with pytest.raises(UsageError, match="positive number"):
        load_prices(path)


def test_tables_name_gpus_of_the_datasheet() -> None:
    known = {spec.name for spec in SPECS}
    assert set(USUAL_NODES) <= known
    assert {system.gpu for system in SYSTEMS.values()} <= known
