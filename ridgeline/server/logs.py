"""Logs as JSON lines: one object a line, with time, level, event, and what else is known of it.

Prompts and answers are in no line unless `--log-prompts` asks for them, and error messages that
quote what a client sent go to the client alone.

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "event": "request", "status": 200, …}
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

FACTS = "facts"  # attribute of a log record: a dict of what the line holds beside its event
QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")  # speak of hostile clients


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
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Everything this process logs becomes JSON lines on stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.ERROR)


def log_facts(logger: logging.Logger, event: str, facts: dict[str, Any]) -> None:
    logger.info(event, extra={FACTS: facts})
