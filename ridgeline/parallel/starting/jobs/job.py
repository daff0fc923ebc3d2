"""A run that somebody else is to start: on how many machines, with which command.

job = Job("run", ("-m", "ridgeline", "train", "run-job/train.json", …), nodes=2, devices=8, …)
torchrun_words(job, ["--node-rank=0", …])
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.parallel.starting.child import package_folder

RESUME = "$resume"  # stands in a script for --resume, where the run is there already


@dataclass(frozen=True)
class Job:
    name: str
    words: tuple[str, ...]  # behind `python`
    out: Path  # the run's folder, by its whole name
    folder: Path  # of the job's files, by its whole name
    nodes: int
    devices: int  # on each node
    on_gpus: bool
    restarts: int = 0
    hang_after: float | None = None
    port: int = 29500
    python: str = sys.executable
    package: Path = field(default_factory=package_folder)

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    @property
    def title(self) -> str:
        """`2 nodes with 8 GPUs each`."""
        what = "GPU" if self.on_gpus else "rank"
        nodes, devices = (
            f"{count} {word}{'' if count == 1 else 's'}"
            for count, word in ((self.nodes, "node"), (self.devices, what))
        )
        return f"{nodes} with {devices} each" if self.nodes > 1 else f"{nodes} with {devices}"


@dataclass(frozen=True)
class JobFile:
    """What was written, and how it is started."""

    path: Path
    text: str
    commands: tuple[str, ...]  # for a person to read or to paste
    submit: tuple[str, ...] = ()  # the words that submit it; none: nothing takes it


def torchrun_line(job: Job, where: Sequence[str]) -> str:
    """The command of one node in a script, over several lines. `where` are torchrun's own words on
    how nodes find each other, quoted already.
    """
    own = [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.devices}",
        f"--max-restarts={job.restarts}",
    ]
    command = [shlex.quote(job.python), "-m", "torch.distributed.run", *own, *where]
    words = [shlex.quote(word) for word in job.words]
    return " \\\n  ".join([" ".join(command), " ".join([*words, RESUME])])


def preamble(job: Job) -> str:
    """What every script sets before it starts ranks."""
    package = shlex.quote(str(job.package))
    config = shlex.quote(str(job.out / "train.json"))
    return (
        "# Nothing in the current folder may stand in for a module.\n"
        "export PYTHONSAFEPATH=1\n"
        f"export PYTHONPATH={package}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f"threads=$(( $(nproc) / {job.devices} ))  # cores for each rank\n"
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}\n"
        "\n"
        "# A job that is started again goes on with its run.\n"
        f"resume=; [ -f {config} ] && resume=--resume\n"
    )
