"""Texts to embed and to score: whose piece is computed next, and what becomes of those that are left."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Self

import pytest

from mlxserve.core.errors import EngineFailed, EngineStopped, InvalidRequest
from mlxserve.core.stats import Stats
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.text_queue import SHORT_TOKENS, QueuedText, TextQueue
from mlxserve.request import Pooling

LONG = SHORT_TOKENS + 1
PIECE = 400  # tokens


class Text:
    """Replaces a DenseText. Writes a line of the log when its last piece is computed."""

    def __init__(self, engine: Texts, name: Any, num_tokens: int) -> None:
        self.engine, self.name, self.left = engine, name, num_tokens
        engine.num_open += 1
        engine.most_open = max(engine.most_open, engine.num_open)

    def release(self) -> None:
        self.engine.num_open -= 1


class Texts:
    """Replaces an Engine that has nothing but texts to compute."""

    max_model_len = 10_000
    has_work = False

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.num_pieces = self.num_open = self.most_open = 0
        self.error: BaseException | None = None
        self.is_sound = True

    def embedding(
        self, token_ids: Sequence[int], _pooling: Pooling, _dimensions: None, _adapter: None
    ) -> Text:
        return Text(self, token_ids[0], len(token_ids))

    def advance(self, text: Text) -> list[float] | None:
        if self.error is not None:
            raise self.error
        self.num_pieces += 1
        text.left -= PIECE
        if text.left > 0:
            return None
        self.log.append(text.name)
        return [float(text.name)]

    def mark(self) -> tuple[int, ...]:
        return ()

    def check(self, _awaited: Collection[str]) -> None:
        assert self.is_sound

    def idle(self) -> bool:
        return False

    @property
    def monitor(self) -> Self:
        """Its own monitor, and what computes texts."""
        return self

    side_work = monitor

    def stats(self) -> Stats:
        return Stats()

    def abort_all(self) -> list[Any]:
        return []

    def close(self, *, keeps_pages: bool) -> None:
        pass


def queued(queue: TextQueue, client: str, name: int, num_tokens: int) -> QueuedText[Any]:
    text = QueuedText[Any](client, num_tokens, lambda engine: Text(engine, name, num_tokens))  # type: ignore[arg-type, return-value]
    queue.push(text)
    return text


def compute_all(queue: TextQueue, engine: Texts) -> list[Any]:
    """The names in the order in which they were computed."""
    while (text := queue.next()) is not None:
        result = text.advance(engine)  # type: ignore[arg-type]
        if text.is_done:
            queue.answer(text, result)
    assert not queue.unanswered
    assert engine.num_open == 0
    return engine.log


def test_one_text_of_a_client_does_not_wait_for_a_thousand_of_another() -> None:
    queue, engine = TextQueue(), Texts()
    for number in range(1_000):
        queued(queue, "a", number, 20)
    queued(queue, "b", -1, 20)
    assert compute_all(queue, engine).index(-1) <= 1
    assert engine.most_open == 1


def test_a_short_text_does_not_wait_for_the_end_of_a_long_one() -> None:
    queue, engine = TextQueue(), Texts()
    for number in range(4):
        queued(queue, "a", number, 100 * PIECE)
    queued(queue, "b", -1, 2 * PIECE)
    assert compute_all(queue, engine)[0] == -1
    assert engine.most_open == 2


def test_two_texts_at_most_are_in_memory_and_one_of_them_is_short() -> None:
    queue, engine = TextQueue(), Texts()
    for number in range(6):
        queued(queue, f"long {number}", number, LONG)
        queued(queue, f"short {number}", 10 + number, SHORT_TOKENS)
    assert sorted(compute_all(queue, engine)) == [*range(6), *range(10, 16)]
    assert engine.most_open == 2


def test_a_text_whose_caller_left_is_not_computed_any_further() -> None:
    queue, engine = TextQueue(), Texts()
    under_way, waiting = queued(queue, "a", 1, 3 * PIECE), queued(queue, "a", 2, PIECE)
    first = queue.next()
    assert first is under_way
    first.advance(engine)  # type: ignore[arg-type]
    for text in (under_way, waiting):
        text.leave()
    queued(queue, "b", 3, PIECE)
    assert compute_all(queue, engine) == [3]
    assert engine.num_pieces == 2


def test_a_client_does_not_pay_for_texts_that_it_left() -> None:
    queue, engine = TextQueue(), Texts()
    for number in range(10):
        queued(queue, "a", number, PIECE).leave()
    assert compute_all(queue, engine) == []
    queued(queue, "a", 20, PIECE)
    queued(queue, "b", 21, PIECE)
    queued(queue, "b", 22, PIECE)
    assert compute_all(queue, engine) == [20, 21, 22]


# ---- on the engine's thread


def run_with(engine: Texts, scenario: Any) -> None:
    stand_in: Any = engine
    served = AsyncEngine(lambda: stand_in)
    try:
        asyncio.run(scenario(served))
    finally:
        served.close()


def test_each_text_gets_its_vector() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        texts = [engine.embed([name] * 50 * name, Pooling.MEAN) for name in range(1, 40)]
        assert await asyncio.gather(*texts) == [[float(name)] for name in range(1, 40)]

    engine = Texts()
    run_with(engine, scenario)
    assert engine.num_open == 0


def test_an_error_of_a_text_reaches_its_caller_alone() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stand_in.error = InvalidRequest("input: it cannot be embedded")
        with pytest.raises(InvalidRequest, match="cannot be embedded"):
            await engine.embed([1], Pooling.MEAN)
        stand_in.error = ZeroDivisionError("of the device")
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await engine.embed([1], Pooling.MEAN)
        stand_in.error = None
        assert await engine.embed([7], Pooling.MEAN) == [7.0]

    stand_in = Texts()
    run_with(stand_in, scenario)
    assert stand_in.num_open == 0


def test_answers_get_a_step_between_any_two_pieces() -> None:
    """Also of an image, whose piece is a layer of the tower."""

    class Busy(Texts):
        has_work = True
        events = ""

        def advance(self, text: Text) -> list[float] | None:
            self.events += "p"
            return super().advance(text)

        def step(self) -> list[Any]:
            self.events += "s"
            self.has_work = self.num_pieces < 6
            return []

        def start(self) -> None:
            pass

        def watch_memory(self, memory: Any) -> None:
            pass

    async def scenario(engine: AsyncEngine) -> None:
        texts = [engine.embed([name] * 3 * PIECE, Pooling.MEAN) for name in (1, 2)]
        await asyncio.gather(*texts)

    engine = Busy()
    run_with(engine, scenario)
    assert engine.num_pieces == 6
    assert "pp" not in engine.events


def test_what_waits_is_refused_when_the_engine_ends() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        waiting = [asyncio.ensure_future(engine.embed([1] * LONG, Pooling.MEAN)) for _ in range(3)]
        await asyncio.sleep(0)
        engine.fail("a rank is lost")
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, EngineStopped)

    class Endless(Texts):
        def advance(self, text: Text) -> None:
            self.num_pieces += 1

    run_with(Endless(), scenario)
