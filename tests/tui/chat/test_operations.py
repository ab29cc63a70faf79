import asyncio
from collections.abc import AsyncGenerator, Coroutine

import pytest

from tui.chat.live_answer import LiveAnswer
from tui.chat.messages import ChatMessage, Role, State
from tui.chat.operations import Operations
from tui.talk.pieces import Piece, TextPiece


class Table:
    """Turns whose background tasks the test can wait for."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.turns = Operations(self._run)
        self.log: list[str] = []
        self.has_begun = asyncio.Event()

    def begin(self, name: str, gate: asyncio.Event | None = None) -> None:
        async def operation() -> None:
            self.log.append(f"{name} begins")
            if gate is not None:
                await gate.wait()
            self.log.append(f"{name} ends")

        self.turns.begin(operation, lambda: self.log.append(f"after {name}"))

    def begin_answer(self) -> list[ChatMessage]:
        ended: list[ChatMessage] = []

        async def operation() -> None:
            ended.append(await self.turns.follow(endless_answer(self.has_begun)))

        self.turns.begin(operation, lambda: None)
        return ended

    async def settle(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*self.tasks)

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        self.tasks.append(asyncio.create_task(coroutine))


def endless_answer(has_begun: asyncio.Event) -> LiveAnswer:
    async def pieces() -> AsyncGenerator[Piece, None]:
        has_begun.set()
        yield TextPiece("half")
        await asyncio.Event().wait()

    async def save(_: ChatMessage) -> None:
        """Nowhere."""

    empty = ChatMessage(id=1, chat_id=1, parent_id=None, role=Role.ASSISTANT, text="")
    return LiveAnswer(empty, pieces(), save)


def test_turns_run_one_after_another() -> None:
    async def run() -> None:
        table, gate = Table(), asyncio.Event()
        table.begin("one", gate)
        table.begin("two")
        await asyncio.sleep(0)
        assert not table.turns.is_idle
        gate.set()
        await table.settle()
        assert table.turns.is_idle
        order = ["one begins", "one ends", "two begins", "two ends"]
        assert [entry for entry in table.log if "after" not in entry] == order
        assert {"after one", "after two"} <= set(table.log)

    asyncio.run(run())


def test_a_new_turn_stops_the_answer_under_way() -> None:
    async def run() -> None:
        table = Table()
        ended = table.begin_answer()
        await table.has_begun.wait()
        table.begin("next")
        await table.settle()
        assert ended[0].state is State.STOPPED
        assert table.turns.answer is None
        assert "next ends" in table.log

    asyncio.run(run())


def test_an_answer_that_begins_while_a_turn_waits_is_stopped_at_once() -> None:
    async def run() -> None:
        table = Table()
        ended = table.begin_answer()
        table.begin("next")
        await table.settle()
        assert (ended[0].state, ended[0].text) == (State.STOPPED, "")

    asyncio.run(run())


def test_finishing_waits_for_what_is_under_way() -> None:
    async def run() -> None:
        table = Table()
        ended = table.begin_answer()
        await table.has_begun.wait()
        async with asyncio.timeout(20):
            await table.turns.finish()
        assert ended[0].state is State.STOPPED
        await table.settle()

    asyncio.run(run())


def test_a_turn_that_fails_leaves_the_table_usable() -> None:
    async def run() -> None:
        table = Table()

        async def fail() -> None:
            raise ZeroDivisionError

        table.turns.begin(fail, lambda: None)
        with pytest.raises(ZeroDivisionError):
            await table.settle()
        table.tasks.clear()
        table.begin("next")
        await table.settle()
        assert table.turns.is_idle

    asyncio.run(run())
