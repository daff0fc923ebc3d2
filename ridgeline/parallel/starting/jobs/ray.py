"""A run as a Python script for Ray, which places the ranks (ray_ranks.py does what it asks for).

ray_job(job).commands           # ("ray job submit -- python …/job.py",)
"""

from __future__ import annotations

import shlex

from ridgeline.parallel.starting.jobs.job import Job, JobFile


def ray_job(job: Job) -> JobFile:
    words = "".join(f"    {word!r},\n" for word in job.words)
    text = f'''"""A training run of Ridgeline on {job.title}.

The run's folder must be one that all of them see. A job that is started again goes on with its run.
"""

import sys

sys.path.insert(0, {str(job.package)!r})

from ridgeline.parallel.starting.ray_ranks import RayOrder, main

WORDS = [
{words}]

ORDER = RayOrder(
    words=WORDS,
    out={str(job.out)!r},
    nodes={job.nodes},
    devices={job.devices},
    on_gpus={job.on_gpus},
    restarts={job.restarts},
    hang_after={job.hang_after},
)

if __name__ == "__main__":
    sys.exit(main(ORDER))
'''
    path = job.folder / "job.py"
    command = ("ray", "job", "submit", "--", job.python, str(path))
    return JobFile(path, text, (shlex.join(command),), command)
