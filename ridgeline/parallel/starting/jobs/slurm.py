"""A run as a script for Slurm's sbatch: a task on each node, which is torchrun.

slurm_job(job, partition="gpu", time="8:00:00", account=None).commands      # ("sbatch …/job.sh",)
"""

from __future__ import annotations

import re
import shlex

from ridgeline.parallel.starting.jobs.job import Job, JobFile, preamble, torchrun_line


def slurm_job(job: Job, partition: str | None, time: str | None, account: str | None) -> JobFile:
    wanted = {
        "job-name": "ridgeline-" + re.sub(r"[^\w.-]", "-", job.name),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices if job.on_gpus else None,
        "partition": partition,
        "time": time,
        "account": account,
        # % begins a pattern of sbatch's
        "output": f'"{str(job.folder).replace("%", "%%")}/job-%j.log"',
    }
    # Whole nodes: a task would otherwise have one core for all of its ranks.
    options = ["#SBATCH --exclusive"]
    options += [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    where = [
        "--rdzv-backend=c10d",
        '--rdzv-id="$SLURM_JOB_ID"',
        f'--rdzv-endpoint="$first:{job.port}"',
    ]
    lines = [
        "#!/bin/bash",
        *options,
        "",
        f"# A training run of Ridgeline on {job.title}. The run's folder must be one that all see.",
        "set -eu",
        preamble(job),
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun --cpu-bind=none --kill-on-bad-exit=1 {torchrun_line(job, where)}",
    ]
    path = job.folder / "job.sh"
    command = ("sbatch", str(path))
    return JobFile(path, "\n".join(lines) + "\n", (shlex.join(command),), command)
