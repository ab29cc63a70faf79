"""The time that an unused model stays loaded, in Ollama's notation: 300, "5m", "1h30m", 0, -1."""

from __future__ import annotations

import math
import re

from mlxserve.core.errors import InvalidConfig

MAX_SECONDS = 365 * 24 * 3600.0  # a longer time is for ever: dates and timers have an end
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# Possessive, so that a digit is read once however the text ends.
_DIGITS = r"(?:\d++(?:\.\d*+)?|\.\d++)"
_NUMBER = re.compile(_DIGITS, re.ASCII)
_PART = re.compile(rf"({_DIGITS})(ns|us|µs|ms|s|m|h)", re.ASCII)


def keep_alive_seconds(value: object) -> float:
    """Seconds from a model's last use until it is unloaded: 0 for at once, inf for never.

    Raises InvalidConfig, which names the option.
    """
    seconds = _of_text(value.strip()) if isinstance(value, str) else _of_number(value)
    if seconds is None:
        raise InvalidConfig(
            'keep_alive must be a number of seconds or a duration such as "5m" or "1h30m", 0 to unload at '
            f"once or -1 for ever, got {str(value)[:40]!r}",
            option="keep_alive",
        )
    return float(seconds) if 0 <= seconds <= MAX_SECONDS else math.inf


def _of_number(value: object) -> float | None:
    """Read a number; None for anything else. An int may be too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        # Only NaN differs from itself.
        return None
    return value


def _of_text(text: str) -> float | None:
    """Read seconds, which may be negative; None if it is neither a number nor a duration."""
    sign, unsigned = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    seconds = float(unsigned) if _NUMBER.fullmatch(unsigned) else _duration(unsigned)
    return None if seconds is None else sign * seconds


def _duration(text: str) -> float | None:
    """Read a duration in Go's notation, without a sign; None if it is none."""
    seconds, at = 0.0, 0
    while part := _PART.match(text, at):
        seconds += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return seconds if 0 < at == len(text) else None
