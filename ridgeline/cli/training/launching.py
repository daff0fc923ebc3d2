"""`--launch slurm|ray|torchrun`: a run as a job that somebody else starts. Its config and its
script are written beside the run's folder, in RUN-job, and the command that starts it is shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ridgeline.errors import HardwareError, MissingPackageError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.starting.jobs.job import Job, JobFile
from ridgeline.parallel.starting.jobs.ray import ray_job
from ridgeline.parallel.starting.jobs.slurm import slurm_job
from ridgeline.parallel.starting.jobs.torchrun import read_hostfile, torchrun_job
from ridgeline.parallel.starting.options import StartOptions
from ridgeline.parallel.starting.order import layout_for
from ridgeline.training.config import TrainConfig, check_complete
from ridgeline.training.config_file import save_config
from ridgeline.training.prepare import with_whole_paths


def job_layout(layout: Layout | None, options: StartOptions) -> Layout:
    """Of all nodes together; one that was not given shards over all devices."""
    if layout is None or options.devices is not None:
        devices = options.nodes * (options.devices or 1)
        return layout_for(layout, devices, "--nodes × --devices")
    if layout.size % options.nodes:
        raise UsageError(
            f"--layout {layout.words()} is one of {layout.size} devices, which {options.nodes} "
            "nodes cannot share evenly; give other --nodes"
        )
    return layout


def write_job(
    config: TrainConfig, options: StartOptions, layout: Layout, out: Path, device: str
) -> dict[str, Any]:
    """Write it, submit it if that was ordered, and return what there is to show."""
    check_complete(config)
    if device.startswith("cuda:"):
        raise UsageError(f"device is {device}, and each rank takes a GPU of its own; give cuda")
    program = {"slurm": "sbatch", "ray": "ray"}.get(options.launch, "")
    if options.submit and shutil.which(program) is None:
        raise MissingPackageError(
            f"--submit needs {program}, which is not installed here; remove --submit, and start "
            f"the job where {program} is"
        )
    out = out.resolve()
    folder = out.with_name(f"{out.name}-job")
    job = _job(options, layout, out, folder, device)
    file = _file(job, options)
    path = save_config(with_whole_paths(config), folder)
    with atomic_write(file.path) as handle:
        handle.write(file.text)
    return {
        "launch": options.launch,
        "title": job.title,
        "config": str(path),
        "job": str(file.path),
        "commands": list(file.commands),
        "submitted": _submitted(file) if options.submit else None,
    }


def _job(options: StartOptions, layout: Layout, out: Path, folder: Path, device: str) -> Job:
    on_gpus = device != "cpu"  # auto: of what is on the nodes, not of what is here
    words = ["-m", "ridgeline", "train", str(folder / "train.json"), "--out", str(out)]
    words += ["--device", "cuda" if on_gpus else "cpu"]
    if options.hang_after is not None and options.launch != "ray":
        words += ["--hang-after", f"{options.hang_after:g}"]
    return Job(
        name=out.name,
        words=tuple(words),
        out=out,
        folder=folder,
        nodes=options.nodes,
        devices=layout.size // options.nodes,
        on_gpus=on_gpus,
        restarts=options.restarts,
        hang_after=options.hang_after,
        port=options.port,
    )


def _file(job: Job, options: StartOptions) -> JobFile:
    if options.launch == "slurm":
        return slurm_job(job, options.partition, options.time, options.account)
    if options.launch == "ray":
        return ray_job(job)
    hosts = []
    if options.hostfile is not None:
        hosts = read_hostfile(Path(options.hostfile), job.nodes, job.devices)
    return torchrun_job(job, hosts)


def _submitted(file: JobFile) -> str:
    """What the program that took it said."""
    done = subprocess.run(file.submit, capture_output=True, text=True, env=os.environ)
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).split("\n")
    answer = " ".join(line.strip() for line in lines if line.strip())
    if done.returncode:
        raise HardwareError(f"{file.submit[0]} refused the job: {answer}")
    return answer
