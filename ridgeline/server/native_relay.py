"""What libraries write past our log, as lines of the log: a process of its own, which reads their
output and writes JSON. It needs nothing but Python's own library, and ends with those it reads.

Its own process, because a library may write while it holds Python's lock, and because the last
words of a process that dies are read as well. What comes at once is one line, cut. Libraries that
are given text of requests quote it in their warnings: of those only where and how much is told.

    python -I -S native_relay.py engine     # or, to show it all: engine --text
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from datetime import UTC, datetime
from typing import Any

PIECE = 1 << 16
PAUSE_S = 0.05  # what comes without such a pause belongs together
LONGEST_S = 1.0  # though not for ever
MAX_CHARACTERS = 4000  # of a line's text
# xgrammar ([12:00:00] /project/cpp/regex.cc:12: …), and Rust's panics in tokenizers.
QUOTING = re.compile(rb"^\[[\d:]+\] (?:\S*/)?([\w.]+:\d+):|panicked at (\S+)", re.MULTILINE)
QUOTING_S = 1.0  # for so long what follows may be the rest of it


class NativeLines:
    """Makes the lines."""

    def __init__(self, process: str, shows_text: bool) -> None:
        self._process, self._shows_text = process, shows_text
        self._quoting_until = 0.0

    def line(self, data: bytes, now: float) -> str:
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": "warning",
            "event": "native output",
            "process": self._process,
            "bytes": len(data),
        }
        shown, sources = self._shown(data, now)
        if sources:
            entry["source"] = ", ".join(dict.fromkeys(sources))[:200]
        if shown.strip():
            text = shown[: MAX_CHARACTERS * 4].decode(errors="backslashreplace").strip()
            entry["text"] = text[:MAX_CHARACTERS]
        if len(shown) < len(data):
            entry["withheld"] = "it may quote a request; --log-prompts shows it"
        return json.dumps(entry) + "\n"

    def _shown(self, data: bytes, now: float) -> tuple[bytes, list[str]]:
        """The part that cannot be a request's, and who quotes one in the rest."""
        matches = list(QUOTING.finditer(data))
        sources = [(match[1] or match[2]).decode(errors="replace") for match in matches]
        was_quoting = now < self._quoting_until
        if matches:
            self._quoting_until = now + QUOTING_S
        if self._shows_text:
            return data, sources
        if was_quoting:
            return b"", sources
        return (data[: matches[0].start()] if matches else data), sources


def next_burst(fd: int) -> bytes:
    """All that comes together; nothing when nobody writes any more."""
    data = bytearray(os.read(fd, PIECE))
    end = time.monotonic() + LONGEST_S
    while data and time.monotonic() < end and select.select([fd], [], [], PAUSE_S)[0]:
        piece = os.read(fd, PIECE)
        if not piece:
            break
        data += piece[: max(0, PIECE - len(data))]  # the rest is read, and lost
    return bytes(data)


def main() -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # it goes on while those it reads do
        signal.signal(number, signal.SIG_IGN)
    lines = NativeLines(sys.argv[1], "--text" in sys.argv[2:])
    while data := next_burst(0):
        os.write(1, lines.line(data, time.monotonic()).encode())


if __name__ == "__main__":
    main()
