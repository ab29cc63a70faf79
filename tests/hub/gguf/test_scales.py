"""Scales in float16: the nearest number, however small or large."""

from __future__ import annotations

import numpy as np

from mlxserve.hub.gguf.scales import in_float16


def test_every_float16_and_what_is_between_two_becomes_the_nearest() -> None:
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = [every[:-1] + share * np.diff(every) for share in (0.499, 0.5)]
    for sign in (1, -1):
        assert np.array_equal(in_float16(sign * every), sign * every)
        assert np.array_equal(in_float16(sign * between[0]), sign * every[:-1])
        assert np.array_equal(in_float16(sign * between[1]), sign * every[1:])


def test_what_float16_cannot_hold_becomes_infinite() -> None:
    with np.errstate(over="ignore"):
        found = in_float16(np.array([1.0, 1e6, -65520.0], np.float32))
    assert found.tolist() == [1.0, np.inf, -np.inf]
