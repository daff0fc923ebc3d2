"""StartOptions: on how many devices a run starts, who starts it, and what happens when it fails.
None of it changes what is learned, so that it is no part of a run's config.

StartOptions(devices=4, restarts=2)
StartOptions(launch="slurm", nodes=2, devices=8, partition="gpu")
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.errors import UsageError, answers_wrong_options
from ridgeline.formats.fields import check_fields, field_help

Launcher = Literal["here", "slurm", "ray", "torchrun"]
SLURM_WORD = re.compile(r"[\w.,:@+-]+")


@answers_wrong_options()
@dataclass(frozen=True)
class StartOptions:
    devices: int | None = field(
        default=None,
        metadata=field_help(
            "start this many ranks here, a GPU each or shares of the cores (default: as many as "
            "the layout has; with --launch: on each node)",
            minimum=1,
        ),
    )
    restarts: int = field(
        default=0,
        metadata=field_help(
            "if a rank dies or hangs: how often all go on from the last checkpoint", minimum=0
        ),
    )
    hang_after: float | None = field(
        default=None,
        metadata=field_help(
            "seconds without progress on any rank after which the run has hung (default: ten "
            "times the slowest step, 300 at least; 900 for the first)",
            minimum=1.0,
        ),
    )
    launch: Launcher = field(
        default="here",
        metadata=field_help("write a job for this launcher instead, and show how it is started"),
    )
    nodes: int = field(default=1, metadata=field_help("with --launch: machines", minimum=1))
    submit: bool = field(default=False, metadata=field_help("with --launch: submit the job too"))
    hostfile: str | None = field(
        default=None,
        metadata=field_help("with --launch torchrun: a file with a machine's name on each line"),
    )
    port: int = field(
        default=29500,
        metadata=field_help(
            "with --launch: where ranks meet on the first machine", minimum=1024, maximum=65535
        ),
    )
    partition: str | None = field(
        default=None, metadata=field_help("with --launch slurm: the partition")
    )
    time: str | None = field(
        default=None, metadata=field_help("with --launch slurm: the time limit, as Slurm has it")
    )
    account: str | None = field(
        default=None, metadata=field_help("with --launch slurm: who pays for it")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hang_after is not None and not math.isfinite(self.hang_after):
            raise UsageError(f"hang_after is {self.hang_after}; give a number of seconds")
        self._check_launcher()
        for name in ("partition", "time", "account"):
            value = getattr(self, name)
            if value is not None and not SLURM_WORD.fullmatch(value):
                raise UsageError(f"{name} is {value!r}; give one word of letters and digits")

    def _check_launcher(self) -> None:
        """That nothing is given which the launcher would not look at."""
        wanted = {
            "slurm": ("partition", "time", "account"),
            "torchrun": ("hostfile",),
        }
        for launcher, names in wanted.items():
            for name in names:
                if getattr(self, name) is not None and self.launch != launcher:
                    raise UsageError(f"--{name} goes with --launch {launcher}; remove it")
        defaults = {"nodes": 1, "submit": False, "port": 29500}
        for name, default in defaults.items():
            if self.launch == "here" and getattr(self, name) != default:
                raise UsageError(
                    f"--{name} goes with --launch slurm, ray or torchrun; add one, or remove it"
                )
        if self.submit and self.launch == "torchrun":
            raise UsageError(
                "--submit goes with --launch slurm or ray; for torchrun start the commands that "
                "are shown on the nodes"
            )

    @property
    def is_supervised(self) -> bool:
        """Whether one rank alone needs somebody to look after it."""
        return self.restarts > 0 or self.hang_after is not None
