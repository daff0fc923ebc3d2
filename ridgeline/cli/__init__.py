"""The command line: one file per verb. `main` is what the installed `ridgeline` command calls."""

from ridgeline.cli.main import main

__all__ = ["main"]
