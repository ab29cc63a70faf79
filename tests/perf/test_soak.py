"""A soak reports minute by minute, and a server passes three minutes of it."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxserve.bench.client import TimedRequest
from tests.perf import soak
from tests.perf.cli import app
from tests.perf.soak import Observed, SoakFailed


def observed() -> Observed:
    """Two minutes from second 100 on; gaps of 10 ms in the first and 30 ms in the second."""
    first = TimedRequest("greedy", 100.0, [110.0, 110.01, 110.02], 110.02)
    second = TimedRequest("seeded", 160.0, [170.0, 170.03], 170.03)
    several = TimedRequest("several", 160.0, [170.0, 175.0], 175.0)
    before = TimedRequest("greedy", 90.0, [91.0, 99.0], 99.0)
    memory = [(100.0 + at, 5_000_000 if at < 60 else 1_000_000 * at // 60) for at in range(120)]
    work = [(101.0, 0.010), (161.0, 0.020)]
    return Observed(100.0, [before, first, second, several], memory, work, pages_left=3)


def test_each_minute_is_compared_with_the_first() -> None:
    found = {figure.name: figure.values for figure in soak.figures(observed(), 2)}
    assert found["gap p99"] == pytest.approx((10, 30))
    assert found["gap p99 over the first minute's"] == pytest.approx((1, 3))
    assert found["fixed work over the first minute's"] == (1, 2)
    assert found["answers"] == (1, 2)
    assert found["errors"] == (0,)
    assert found["pages not released"] == (3,)


def test_memory_growth_is_that_of_the_second_half() -> None:
    assert soak.slope_per_hour(observed()) == pytest.approx(60, rel=0.01)


def test_resident_memory_grows_with_written_pages() -> None:
    before = soak.resident_bytes(os.getpid())
    size = 256 << 20
    with mmap.mmap(-1, size) as filled:  # a bytearray may reuse freed memory
        filled.write(bytes([1]) * size)
        assert 0.9 * size < soak.resident_bytes(os.getpid()) - before < 3 * size


def test_a_missing_process_is_an_error() -> None:
    with pytest.raises(SoakFailed, match="does not know process 99999999"):
        soak.resident_bytes(99_999_999)


def test_a_client_that_disconnects_has_no_answer() -> None:
    class Client:
        async def ask(
            self,
            prompt: str,
            max_tokens: int,
            *,
            on_text: Callable[[TimedRequest], None],
            **_: object,
        ) -> TimedRequest:
            request = TimedRequest("", 0.0)
            for _number in range(max_tokens):
                request.times.append(0.0)
                request.text += "w1 "
                on_text(request)
            return request

    def words(leaves_after: int | None) -> list[str]:
        client: Any = Client()
        return asyncio.run(soak.ask(client, ["w2"], 3, "greedy", leaves_after))

    assert words(None) == ["w1"] * 3
    assert words(2) == []


def test_no_prompt_outgrows_the_pool() -> None:
    """A word is at most six tokens of the embedded model."""
    assert 6 * (soak.MAX_WORDS + 64) < soak.NUM_PAGES * 32


@pytest.mark.long
def test_minutes_of_mixed_load_hold(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    result = CliRunner().invoke(app, ["soak", "--minutes", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found: Mapping[str, list[float]] = {
        figure["name"]: figure["values"] for figure in json.loads(file.read_text())["figures"]
    }
    assert found["pages not released"] == [0]
    assert found["errors"] == [0]
    assert min(found["answers"]) > 0
    memory = found["memory"]
    assert memory[-1] < 1.2 * memory[0], memory  # the largest steps run before the first minute


def test_clients_differ_and_are_repeatable() -> None:
    draws = [soak.random_words(random.Random(number), 8) for number in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
