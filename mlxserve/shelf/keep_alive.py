"""How long a model stays loaded that is not used, in Ollama's words: 300, "5m", "1h30m", 0, -1."""

from __future__ import annotations

import math
import re

from mlxserve.errors import InvalidConfig

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h)", re.ASCII)
# A number of seconds, or a duration as Go writes it.
_DURATION = re.compile(rf"([-+]?)(?:({_NUMBER})|((?:{_PART.pattern})+))", re.ASCII)


def keep_alive_seconds(value: object, name: str = "keep_alive") -> float:
    """Seconds from a model's last use until it is unloaded: 0 at once, below 0 for ever (inf).

    Raises InvalidConfig, which names the option.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match = _DURATION.fullmatch(f"{value:f}" if is_number else str(value).strip())
    if match is None:
        raise InvalidConfig(
            f'{name} must be a number of seconds or a duration such as "5m" or "1h30m", 0 to unload at '
            f"once or -1 for ever, got {str(value)[:40]!r}",
            option=name,
        )
    sign, number, duration = match[1], match[2], match[3] or ""
    parts = [float(count) * _UNITS[unit] for count, unit in _PART.findall(duration)]
    seconds = sum(parts) if number is None else float(number)
    return math.inf if sign == "-" and seconds else seconds
