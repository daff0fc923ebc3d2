"""How the ranks of a run come to be, and to their end: started here, by torchrun, by Slurm or Ray.

`child.py` is one process, `place.py` which rank a process is; `supervisor.py` starts the ranks of
this machine and ends them together, `watch.py` sees one that hangs, `endings.py` says which of
them it was; `jobs/` writes what other launchers start.
"""
