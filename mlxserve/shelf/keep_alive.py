"""How long a model stays loaded that is not used, in Ollama's words: 300, "5m", 0, -1."""

from __future__ import annotations

import math
import re

from mlxserve.errors import InvalidConfig

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)", re.ASCII)


def keep_alive_seconds(value: object, name: str = "keep_alive") -> float:
    """Seconds from a model's last use until it is unloaded: 0 at once, below 0 for ever (inf).

    Raises InvalidConfig, which names the option.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match = _DURATION.fullmatch(f"{value:f}" if is_number else str(value).strip())
    if match is None:
        raise InvalidConfig(
            f'{name} must be a number of seconds or a duration such as "5m" or "1h", 0 to unload at '
            f"once or -1 for ever, got {str(value)[:40]!r}",
            option=name,
        )
    seconds = float(match[1]) * _UNITS[match[2]]
    return math.inf if seconds < 0 else seconds
