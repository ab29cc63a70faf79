"""How long a model stays loaded, in Ollama's words."""

from __future__ import annotations

import math

import pytest

from mlxserve.errors import InvalidConfig
from mlxserve.shelf.keep_alive import keep_alive_seconds


def test_numbers_are_seconds_and_less_than_0_is_for_ever() -> None:
    for value, seconds in [
        (300, 300),
        (1.5, 1.5),
        ("300", 300),
        ("5m", 300),
        ("1.5h", 5400),
        ("250ms", 0.25),
        (" 10s ", 10),
        ("1h30m", 5400),
        ("1m.5s", 60.5),
        ("+2s", 2),
        ("0s", 0),
        ("-0", 0),
        ("9" * 400, math.inf),
        (0, 0),
        ("0", 0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-5m", math.inf),
    ]:
        assert keep_alive_seconds(value) == seconds, value


def test_anything_else_is_refused_by_name() -> None:
    for value in [
        "",
        "soon",
        "5 minutes",
        "5d",
        "1h 30m",
        "1h30",
        "-",
        "1e3",
        True,
        None,
        [],
        math.nan,
        "٣",
    ]:
        with pytest.raises(InvalidConfig, match=r"^keep_alive must be a number of seconds"):
            keep_alive_seconds(value)
