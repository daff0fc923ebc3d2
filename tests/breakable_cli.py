"""The command line, with an engine whose faults are switched on by files (server_faults.py)."""

import sys
from functools import partial

from server_faults import make_breakable

from ridgeline.cli import main, serve

if __name__ == "__main__":
    serve.SupervisedEngine = partial(serve.SupervisedEngine, setup=make_breakable)  # type: ignore
    sys.exit(main())
