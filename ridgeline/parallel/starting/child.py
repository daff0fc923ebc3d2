"""A process that this one starts, and that ends when this one has gone, however that came: its
standard input is a pipe from here, and closes with it.

    child = start_child(["-m", "ridgeline", "train", …], child_environment())
    end_children([child])               # its input closes; one that does not end is killed
    how_ended(child.returncode)         # "was killed by signal 9"

    end_with_parent()                   # in the child
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import distributed

dist: Any = distributed  # whose stubs name only half of what it has

STOP_S = 5.0  # what a process gets to end by itself


def start_child(
    words: Sequence[str], environment: Mapping[str, str], output: Any = None
) -> subprocess.Popen[bytes]:
    """A new Python with these words behind `python`. `output` is where it writes; None: as here."""
    return subprocess.Popen(
        # -P: a file in the current folder must not stand in for a module.
        [sys.executable, "-P", *words],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=dict(environment),
        start_new_session=True,  # a Ctrl-C is for this process, which then ends the others
    )


def child_environment() -> dict[str, str]:
    """This process's, in which a new Python finds this package, however this one came to it."""
    paths = filter(None, [str(package_folder()), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def package_folder() -> Path:
    """The folder that this package lies in."""
    return Path(__file__).parents[3]


def stdin_of(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdin is not None, "it was started with a pipe"
    return process.stdin


def end_children(processes: Sequence[subprocess.Popen[bytes]], patience_s: float = STOP_S) -> None:
    """One that still runs sees its input close, and ends; one that does not is killed."""
    for process in processes:
        with suppress(BrokenPipeError):
            stdin_of(process).close()
    end = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def how_ended(code: int) -> str:
    """A return code of `subprocess` in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def end_with_parent() -> None:
    """From now on this process ends when its standard input does."""
    threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    os.read(0, 1)  # nothing more is ever written: this is the end of the pipe
    os._exit(1)


def local_store() -> Any:
    """A store that only this machine reaches; torch's own would listen on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
