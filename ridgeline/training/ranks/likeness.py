"""That all ranks were given the same: another seed or batch on one of the machines would train
something that nobody ordered, another shape or length would let ranks wait for each other.

    check_layout(layout, process.store, process.rank)       # before groups are made of it
    check_alike(config, model, mesh)                        # UsageError on all ranks alike
"""

from __future__ import annotations

from typing import Any

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.parallel.agreeing import together
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import differences
from ridgeline.training.ranks.crew import Crew


def check_layout(layout: Layout, store: Any, rank: int) -> None:
    """Held to the first rank's. One that has another ends, and who has started it ends the rest."""
    if rank == 0:
        store.set("layout", layout.words())
        return
    first = store.get("layout").decode()
    if first != layout.words():
        raise UsageError(
            f"rank {rank} was given layout {layout.words()} and rank 0 {first}; start every rank "
            "with the same command"
        )


def check_alike(config: TrainConfig, model: ModelConfig, mesh: Mesh | None) -> None:
    if mesh is None or mesh.control is None:
        return
    first, first_model = Crew(mesh, config).value_of_first((config, model))

    def check() -> None:
        changed = [each.replace(", was ", ", on rank 0 ") for each in differences(first, config)]
        if not changed and model != first_model:
            changed = ["another model"]
        if changed:
            raise UsageError(
                f"a rank was given another config than rank 0: {'; '.join(changed)}; start every "
                "rank with the same command"
            )

    together(mesh.control, check)
