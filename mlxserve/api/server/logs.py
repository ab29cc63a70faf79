"""The commands' log on stderr: one line per record, even if clients send control characters."""

from __future__ import annotations

import logging
import sys
from typing import Any

from mlxserve.system.terminal_text import escaped, escaped_lines

_POLLED = ("/health", "/ready", "/metrics")


class _OneLine(logging.Formatter):
    """Escapes control characters in messages. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return escaped_lines(super().formatException(ei))


def _is_not_a_poll(record: logging.LogRecord) -> bool:
    """False for the requests of process monitors, which come every few seconds."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(argument in _POLLED for argument in arguments)


def configure(level: str) -> None:
    """Send the log to stderr. uvicorn's loggers propagate into it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    access = logging.getLogger("uvicorn.access")
    access.removeFilter(_is_not_a_poll)
    if logging.root.level > logging.DEBUG:
        access.addFilter(_is_not_a_poll)
