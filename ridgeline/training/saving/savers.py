"""Which saver a run has: one device's, each rank's for its part, or the first rank's for what is
the same on all.

    with saver_of(run, trainer, exporter, keep=2) as saver: ...
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.training.ranks.rank_trainer import MeshTrainer, RankTrainer
from ridgeline.training.saving.adapter_files import AdapterExporter
from ridgeline.training.saving.checkpoint import Exporter
from ridgeline.training.saving.first_rank_saver import FirstRankSaver
from ridgeline.training.saving.rank_saver import RankSaver
from ridgeline.training.saving.saver import CheckpointSaver
from ridgeline.training.stepping.step import Trainer


def saver_of(
    run: Path, trainer: Trainer, exporter: Exporter | AdapterExporter, keep: int
) -> CheckpointSaver:
    if isinstance(trainer, RankTrainer):
        assert isinstance(exporter, Exporter), "check_under_layout"
        return RankSaver(run, trainer, exporter, keep)
    if isinstance(trainer, MeshTrainer):
        assert isinstance(exporter, AdapterExporter), "what else is the same on all ranks"
        return FirstRankSaver(run, trainer, exporter, keep)
    return CheckpointSaver(run, trainer, exporter, keep)
