"""Logging set-up, called once by each process's main."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON line per event; what a call passes as `extra` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
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
