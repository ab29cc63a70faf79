from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

import pytest

from mlxserve.helpers import turn
from mlxserve.helpers.fair_executor import Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.piecewise import Piecewise
from mlxserve.helpers.turn import take_turn
from mlxserve.helpers.work import Work

T = TypeVar("T")
ENOUGH = 60.0  # seconds of a processor


def turned(pieces: Sequence[str], seconds: float) -> tuple[list[str], float]:
    """What a turn yields, and the seconds that it returns."""
    taking = take_turn(pieces, seconds, lambda piece, left: f"{piece} {left <= seconds}")
    results = []
    while True:
        try:
            results.append(next(taking))
        except StopIteration as end:
            return results, end.value


def test_a_turn_does_all_pieces_that_are_quick() -> None:
    results, used = turned(["a", "b"], ENOUGH)
    assert results == ["a True", "b True"]
    assert 0 <= used < ENOUGH


def test_a_turn_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "TURN_SECONDS", 0.0)
    assert turned(["a", "b"], ENOUGH)[0] == ["a True"]


def test_a_turn_ends_with_the_time_of_its_request() -> None:
    assert turned(["a", "b"], 0.0)[0] == ["a True"]


class Echo:
    """A worker that has time for one piece in a turn."""

    def __init__(self) -> None:
        turn.TURN_SECONDS = 0.0  # of its process

    def run(self, pieces: Sequence[str], seconds: float) -> Generator[str, None, float]:
        return take_turn(pieces, seconds, lambda piece, _: piece)

    def run_long(self, pieces: Sequence[str], seconds: float) -> Generator[str, None, float]:
        """Claims that each piece takes a second."""
        yield pieces[0]
        return 1.0


@pytest.fixture
def helper() -> Iterator[Helper]:
    helper = Helper(f"{__name__}:Echo", name="echo", memory=256 << 20)
    yield helper
    helper.close()


def results(helper: Helper, method: str, pieces: Sequence[str]) -> tuple[list[str], list[Lane]]:
    lanes: list[Lane] = []

    async def run(work: Work[T]) -> T:
        lanes.append(lane_of(work.seconds))
        result: T = work.run()
        return result

    piecewise = Piecewise(helper, method, piece_seconds=ENOUGH, max_seconds=2.0)
    return asyncio.run(piecewise.results(pieces, run, seconds=0.0)), lanes


def test_what_is_left_of_a_request_waits_for_its_turn(helper: Helper) -> None:
    helper.start()
    found, lanes = results(helper, "run", ["a", "b", "c"])
    assert found == ["a", "b", "c"]
    assert lanes == [Lane.SHORT, Lane.MEDIUM, Lane.MEDIUM]


def test_a_request_has_its_seconds_over_all_turns(helper: Helper) -> None:
    helper.start()
    found, lanes = results(helper, "run_long", ["a", "b", "c"])
    assert found == ["a", "b", None]
    assert lanes == [Lane.SHORT, Lane.MEDIUM]
