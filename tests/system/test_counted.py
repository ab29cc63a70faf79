"""A number's unit is plural unless the number is one."""

from __future__ import annotations

from mlxserve.system.counted import counted


def test_one_is_singular_and_thousands_have_commas() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 1200)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,200 tokens",
    ]
