"""The process in which generated code runs; started by sandbox.py, never imported by anything.

It takes limits and a secret from stdin, gives up what it can (network, memory, time, other
processes, files outside its folder), runs the program, and writes the secret only if that came to
its end. A program that ends the process itself has not passed.

This keeps programs that a model wrote by mistake from doing harm. It is no wall against somebody
who means to break out: run such code in a virtual machine.
"""

import ctypes
import json
import os
import resource
import sys

NEW_USER, NEW_NET = 0x10000000, 0x40000000
# Events of Python's audit (PEP 578) that a program under test has no use for.
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.killpg",
    "pty.",
    "ctypes.",
    "shutil.",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.putenv",
    "signal.",
)
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def leave_network() -> bool:
    """Into a network of its own that leads nowhere; False where the system does not allow it."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NET) == 0
    except (OSError, AttributeError):
        return False


def limit(seconds: int, memory_bytes: int, file_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def forbid(folder: str) -> None:
    """From now on what is not allowed raises PermissionError; there is no way to take that back."""

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            check_path(event, arguments[0])
        if event in CHANGES:
            for path in arguments[: 2 if event == "os.rename" else 1]:
                check_path(event, path)

    def check_path(event: str, path: object) -> None:
        if not isinstance(path, (str, bytes)):
            raise PermissionError(f"{event} is not allowed here")
        whole = os.path.realpath(os.path.join(folder, os.fsdecode(path)))
        if not whole.startswith(folder + os.sep):
            raise PermissionError(f"{event} of {whole} is not allowed here")

    sys.addaudithook(check)


def main() -> None:
    order = json.loads(sys.stdin.readline())
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints is nobody's
    without_network = leave_network()
    limit(order["seconds"], order["memory_bytes"], order["file_bytes"])
    forbid(os.path.realpath(os.getcwd()))
    try:
        exec(compile(order["program"], "program.py", "exec"), {"__name__": "__main__"})
        answer = {"secret": order["secret"], "problem": None}
    except BaseException as error:  # SystemExit too: a program under test has to come to its end
        answer = {"secret": None, "problem": f"{type(error).__name__}: {error}"[:300]}
    os.write(answers, json.dumps(answer | {"own_network": without_network}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
