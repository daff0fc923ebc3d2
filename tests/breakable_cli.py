"""The command line, with an engine whose faults are switched on by files (server_faults.py)."""

import sys

from server_faults import make_breakable_for_server

from ridgeline.cli import main, serve

if __name__ == "__main__":
    serve.prepare = make_breakable_for_server
    sys.exit(main())
