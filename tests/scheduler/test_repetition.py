from __future__ import annotations

import random

from mlxserve.request import as_token_ids
from mlxserve.scheduler.repetition import (
    INTERVAL,
    MAX_PERIOD,
    MIN_TIMES,
    MIN_TOKENS,
    repeats_itself,
)

PROMPT = [1, 2, 3]


def ended_at(answer: list[int]) -> int | None:
    """The number of output tokens at which the answer is first found to repeat itself."""
    for end in range(len(answer) + 1):
        if repeats_itself(as_token_ids(PROMPT + answer[:end]), len(PROMPT)):
            return end
    return None


def plain(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 150_000) for _ in range(count)]


def test_a_loop_is_found_once_it_is_long_enough() -> None:
    for period in [1, 2, 3, 7, 16, 17, 24, 25, 60, MAX_PERIOD]:
        for num_before in [0, 37]:
            piece = random.Random(period).sample(range(200_000), period)
            answer = plain(num_before) + piece * (2 * MIN_TOKENS + MIN_TIMES)
            length = max(MIN_TOKENS, MIN_TIMES * period)
            found = ended_at(answer)
            assert found is not None, (period, num_before)
            assert num_before + length <= found < num_before + length + INTERVAL, (
                period,
                num_before,
            )


def test_a_longer_period_or_fewer_times_is_no_loop() -> None:
    long = random.Random(1).sample(range(200_000), MAX_PERIOD + 1)
    assert ended_at(long * 20) is None
    paragraph = random.Random(2).sample(range(200_000), 60)
    assert ended_at(paragraph * (MIN_TIMES - 1) + plain(500)) is None


def test_a_loop_with_one_token_of_difference_is_none() -> None:
    answer = [7, 8] * 90 + [9] + [7, 8] * 90
    assert ended_at(answer) is None


def test_numbered_lines_and_tables_are_no_loops() -> None:
    lines = [token for number in range(300) for token in (11, 500 + number, 12, 13, 14)]
    assert ended_at(lines) is None


def test_a_period_that_repeats_within_itself_is_found() -> None:
    """The nearest earlier place of the last tokens is then not a period away."""
    piece = [5] * 40 + [6]
    found = ended_at(piece * 40)
    assert found is not None
    assert found < MIN_TIMES * len(piece) + 41 + INTERVAL


def test_bytes_that_match_across_tokens_are_no_loop() -> None:
    # 0x01000001 repeated matches itself after three bytes, too.
    answer = plain(220) + [0x01010101, 0x01010100] * 4
    assert ended_at(answer) is None


def test_the_prompt_does_not_count() -> None:
    tokens = as_token_ids([4] * 1000)
    assert not repeats_itself(tokens, 1000 - INTERVAL)
    assert repeats_itself(tokens, 1000 - 2 * MIN_TOKENS)
