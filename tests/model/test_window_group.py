"""How a server divides its cache between layers with a window and the others, and what the log says of it."""

from __future__ import annotations

import logging

import pytest

from mlxserve.cache.groups import Window
from mlxserve.core.config import EngineConfig
from mlxserve.model.window_group import WindowGroup

KIB, GB = 1 << 10, 1 << 30
LONGEST = 262_144
GEMMA_4 = WindowGroup(Window(1024, 32), 32 * 200 * KIB, 32 * 20 * KIB)  # 26B


def fitted(nbytes: int, **options: int) -> tuple[int, float]:
    """(tokens, windows)"""
    config = EngineConfig().with_options(max_num_batched_tokens=512, **options)
    longest = config.scheduler.max_model_len or LONGEST
    num_pages, num_window_pages = GEMMA_4.fitted(config, nbytes, longest)
    return num_pages * 32, GEMMA_4.window.num_windows(num_window_pages)


def test_windows_come_before_the_second_half_of_a_context_that_is_not_given() -> None:
    memory = int(1.2 * GB)
    tokens, windows = fitted(memory)
    assert tokens == 26_112
    assert 3 < windows < 4
    tokens, windows = fitted(memory, max_model_len=45_000)
    assert tokens >= 45_000
    assert windows < 2
    tokens, windows = fitted(memory, max_model_len=8192)
    assert tokens >= 8192
    assert windows > 3.4
    tokens, windows = fitted(memory, max_num_seqs=1)
    assert tokens > 45_000
    tokens, windows = fitted(memory, num_window_pages=40)
    assert windows == 40 / 34


def test_the_log_says_what_was_divided_and_warns_of_fewer_windows_than_seats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        GEMMA_4.log_division(816, 115, max_num_seqs=64)
    divided, warning = caplog.records
    assert "26112 tokens in layers that keep all positions and 3.4 windows" in divided.getMessage()
    assert warning.levelno == logging.WARNING
    assert "At most 3 requests longer than 1024 tokens run at the same time instead of 64" in (
        warning.getMessage()
    )
    caplog.clear()
    with caplog.at_level(logging.INFO):
        GEMMA_4.log_division(816, 115, max_num_seqs=3)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
