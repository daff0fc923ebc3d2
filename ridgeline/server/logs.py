"""Logs as JSON lines: one object a line, with time, level, event, and what else is known of it.

Prompts and answers are in no line unless `--log-prompts` asks for them, and error messages that
quote what a client sent go to the client alone. What libraries write to the process's output by
themselves becomes lines of the same form (native_relay.py).

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "event": "request", "status": 200, …}
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ridgeline.server import native_relay

FACTS = "facts"  # attribute of a log record: a dict of what the line holds beside its event
QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")  # speak of hostile clients


SERVER = "server"  # the process whose own output is for a terminal
# What JSON leaves as it is, and a terminal or a reader of lines does not.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, FACTS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def start_logging(
    stream: TextIO | None = None,
    level: int = logging.INFO,
    process: str | None = None,
    log_prompts: bool = False,
) -> None:
    """Everything this process logs becomes JSON lines on stderr. With a name for the process also
    what libraries write there, and to stdout.
    """
    if process is not None:
        stream = catch_native_output(process, log_prompts)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.ERROR)


def catch_native_output(process: str, log_prompts: bool) -> TextIO:
    """From now on what is written to this process's stdout and stderr, and to those of processes
    that it starts, goes through the relay. The real stderr, for the log, is returned; in the
    server's own process Python's streams stay with the terminal.
    """
    real = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    if process == SERVER:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
        sys.stderr = real
    script = [sys.executable, "-I", "-S", str(Path(native_relay.__file__))]
    flags = ["--text"] if log_prompts else []
    reader, writer = os.pipe()
    subprocess.Popen([*script, process, *flags], stdin=reader, stdout=real, stderr=real)
    os.close(reader)
    for fd in (1, 2):
        os.dup2(writer, fd)
    os.close(writer)
    return real


def log_facts(logger: logging.Logger, event: str, facts: dict[str, Any]) -> None:
    logger.info(event, extra={FACTS: facts})
