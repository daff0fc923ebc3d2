"""What a source says of its runs beside the table that a row was read from: settings that hold for
all of a day's rows, or that stand in a column which only one of its tables has. Each with the place
where it is said; nothing here is worked out from what was measured.

    completed(row)["hidden"]        # "14400" of BLOOM's rows of the 20th of February
    day_slowness(row)            # what the source says of that day's machine
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Row = Mapping[str, str]
BLOOM = "bloom_layouts"
# BLOOM's prequel (chronicles-prequel.md), "Choosing the fastest 3D Topology": layers "had to be
# tweaked to fit PP and NHIDDEN was fixed", at the 14400 of the line above; 96 heads (the 200B
# model of 02-17). "All NHEADS=64 (above too)" is said of the rounds from 02-21 on.
FIXED_DAY, FIXED_WIDTH, FIXED_HEADS = "02-20", "14400", "96"
USUAL_HEADS = "64"
# Its rows on one node: "NHIDDEN=14336 / NLAYERS=6 / GBS=512", while the column says 2048, which
# their seconds and FLOP/s contradict; the third has 10 in a column Layers of its own.
ONE_NODE_BATCH, ONE_NODE_WIDTH, THIRD_LAYERS = "512", "14336", "10"
# "A100s PCI-Express/NUMA was improved today so all TFLOPs have changed for the better (1-5%)".
FASTER_FROM, SLOWER_BEFORE = "02-25", 1.03
# "From now on the testing is happening with BF16 optimizer that … accumulate[s] gradients in fp32"
BF16_FROM = "02-28"


def day_of(row: Row) -> str:
    """Of BLOOM's rows, as the source dates them; "" where there is none."""
    day = re.search(r"; (\d\d-\d\d)\b", row.get("technique", "") + row.get("note", ""))
    return day[1] if day and row["group"] == BLOOM else ""


def completed(row: Row) -> Row:
    """With what the source says of settings that its columns leave open."""
    if row.get("group") != BLOOM:
        return row
    known = dict(row)
    if day_of(row) == FIXED_DAY and row.get("hidden", "") in ("", FIXED_WIDTH):
        known |= {"hidden": FIXED_WIDTH, "layers": "", "heads": row.get("heads") or FIXED_HEADS}
    if row.get("num_gpus") == "8":
        known |= {"gbs": ONE_NODE_BATCH, "hidden": ONE_NODE_WIDTH}
        known["layers"] = row.get("layers") or THIRD_LAYERS
    known["heads"] = known.get("heads") or USUAL_HEADS
    return known


def day_slowness(row: Row) -> float:
    """Of the machine on a row's day, over that of the source's later ones."""
    day = day_of(row)
    return SLOWER_BEFORE if day and day < FASTER_FROM else 1.0


def sums_in_fp32(row: Row) -> bool:
    """Gradients in bf16, and their sums in fp32 beside them."""
    return row["group"] == "bloom" or day_of(row) >= BF16_FROM
