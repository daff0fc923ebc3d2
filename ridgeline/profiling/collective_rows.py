"""What ranks told each other in a training step, as rows for people: the terminal's table and both
pages have the same. Measured by `parallel/exposed.py`.

collective_rows(waits["collectives"], step_s)[0]    # ("all-gather", "shard", "2", "33", …)
waiting_sentence(waits)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.hardware.units import human, human_bytes
from ridgeline.profiling.drawing import Column, Markup, table

HEADINGS = ("in a step", "over", "ranks", "times", "message bytes", "sent", "waited for", "share")
NUM_WORDS = 2  # of the headings: words, not numbers
BESIDE = "beside compute"  # nobody can say how long it was waited for
WITH_RECEIVE = "with receive"


def collective_rows(
    collectives: Sequence[Mapping[str, Any]], step_s: float
) -> list[tuple[str, ...]]:
    return [
        (
            each["kind"],
            each["over"],
            f"{each['num_ranks']:,}",
            f"{each['count']:,}",
            human_bytes(each["num_bytes"]),
            human_bytes(round(each["sent_bytes"])),
            *_waited(each, step_s),
        )
        for each in collectives
    ]


def _waited(each: Mapping[str, Any], step_s: float) -> tuple[str, str]:
    seconds = each["exposed_s"]
    if seconds is None:
        return (WITH_RECEIVE if each["kind"] == "send" else BESIDE), ""
    return human(seconds, "s"), f"{seconds / step_s:.1%}"


def waiting_sentence(waits: Mapping[str, Any]) -> str:
    """`ranks wait for each other 12% of a step: all-gather over shard 8%, …`: the largest three."""
    step_s = waits["measured_step_s"]
    largest = [
        f"{each['kind']} over {each['over']} {each['exposed_s'] / step_s:.0%}"
        for each in waits["collectives"][:3]
        if each["exposed_s"]
    ]
    return (
        f"ranks wait for each other {waits['exposed_s'] / step_s:.0%} of a step: "
        f"{', '.join(largest) or 'nothing that is known'}"
    )


def collectives_figure(collectives: Sequence[Mapping[str, Any]], step_s: float) -> Markup:
    """For a page."""
    columns = [Column(name, is_number=i >= NUM_WORDS) for i, name in enumerate(HEADINGS)]
    return table(columns, collective_rows(collectives, step_s), "Collectives of a step")
