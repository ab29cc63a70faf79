"""What Python's parser of JSON takes beyond JSON, as parsers of `json.loads` that refuse it."""

from __future__ import annotations

import math
from typing import Never


def refuse_constant(name: str) -> Never:
    """Raises ValueError for NaN and the infinities."""
    raise ValueError(f"{name} is not a JSON number")


def finite(digits: str) -> float:
    """Parse a number. Raises ValueError for one that is an infinity as a float."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return value
