"""What other launchers start: one file for each, which turns a `Job` into a script and the command
that starts it. All of them run `ridgeline train FILE.json`, under torchrun or as Ray's actors.

    from ridgeline.parallel.starting.jobs.slurm import slurm_job
    files = slurm_job(job, partition="gpu")
"""
