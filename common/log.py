"""Logging set-up, called once by each process's main, and what a line says of the request that it belongs to."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_fields: ContextVar[dict[str, str] | None] = ContextVar("kvferry_log_fields", default=None)


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Lines written inside, also by tasks and threads that are started inside, carry these; empty ones are left out.

    Inner fields add to outer ones. A task that outlives the request must be started with a context of its own.
    """
    token = _fields.set((_fields.get() or {}) | {name: value for name, value in fields.items() if value})
    try:
        yield
    finally:
        _fields.reset(token)


def add_log_field(name: str, value: str) -> None:
    """One more for the innermost `log_fields`, from here on, wherever in it this is called; nothing outside of one."""
    if value and (fields := _fields.get()) is not None:
        fields[name] = value


class JsonFormatter(logging.Formatter):
    """One JSON line per event; `log_fields` and what a call passes as `extra` become fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields.get() or {}
        line |= {k: v for k, v in vars(record).items() if k not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(level: str = "info", style: Literal["text", "json"] = "text") -> None:
    """Routes the `kvferry` loggers to stderr. Calling it again replaces the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("kvferry")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
