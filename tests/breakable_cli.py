"""The command line, with an engine whose faults are switched on by files (server_faults.py)."""

import sys

from server_faults import note_turns, setup_for

from ridgeline.cli import main, serve

if __name__ == "__main__":
    serve.setup_for = setup_for
    code = main()
    note_turns("server")
    sys.exit(code)
