"""How long a model stays loaded, in Ollama's words."""

from __future__ import annotations

import contextlib
import math
import time

import pytest

from mlxserve.chat.registry.keep_alive import MAX_SECONDS, keep_alive_seconds
from mlxserve.core.errors import InvalidConfig


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
        ("1.s", 1),
        ("1µs1us1ns", 2.001e-6),
        ("1h1h", 7200),
        (-1, math.inf),
        (-1e-300, math.inf),
        ("-1", math.inf),
        ("-5m", math.inf),
    ]:
        assert keep_alive_seconds(value) == seconds, value


def test_more_than_a_year_is_for_ever() -> None:
    assert MAX_SECONDS == 365 * 24 * 3600
    for value in [MAX_SECONDS, int(MAX_SECONDS), "8760h", "31536000", "525600m0.0s"]:
        assert keep_alive_seconds(value) == MAX_SECONDS, value
    for value in [
        MAX_SECONDS + 1,
        1e15,
        1e308,
        math.inf,
        -math.inf,
        10**4_000,
        -(10**4_000),
        "8760h1us",
        "2562047h47m16.854775807s",
        "1h" * 8761,
        "9" * 400 + "h",
    ]:
        assert keep_alive_seconds(value) == math.inf, str(value)[:40]


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
        "3\u0661s",
        ".",
        ".s",
        "1.2.3s",
        "++1s",
        "- 1s",
        "1_000",
        "0x10",
        "inf",
        "nan",
        "s",
        "1S",
        False,
        {},
        b"5m",
        "1" * 400 + "x",
    ]:
        with pytest.raises(InvalidConfig, match=r"^keep_alive must be a number of seconds"):
            keep_alive_seconds(value)


@pytest.mark.parametrize(
    ("unit", "end"),
    [
        ("1", "x"),
        ("1", "."),
        ("1", "h"),
        (".", "1"),
        ("1h", ""),
        ("1h", "x"),
        ("1.", ""),
        ("0", ""),
    ],
)
def test_a_long_text_is_read_once(unit: str, end: str) -> None:
    for size in (10_000, 100_000, 1_000_000):
        text = unit * (size // len(unit)) + end
        began = time.thread_time()
        with contextlib.suppress(InvalidConfig):
            keep_alive_seconds(text)
        # 0.5 us for each character where every second one ends a part; the square takes 2 s for the first.
        assert time.thread_time() - began < 25e-6 * size
