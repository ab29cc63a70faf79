"""The commands' log on stderr: one line per record, even if clients send control characters."""

from __future__ import annotations

import logging
import sys

# Characters that can move the cursor, forge a line or reorder text: C0 and C1, line and paragraph
# separators, and bidirectional controls.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F)]
_CONTROLS += range(0x2066, 0x206A)
_POLLED = ("/health", "/ready", "/metrics")
ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}


class _OneLine(logging.Formatter):
    """Escapes control characters in messages. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(ESCAPES)
        return super().formatMessage(record)


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
