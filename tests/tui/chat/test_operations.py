import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine

import pytest

from mlxserve.history.messages import Role, State, StoredMessage
from tui.chat.live_answer import LiveAnswer
from tui.chat.operations import Operations
from tui.talk.pieces import Piece, TextPiece


class Background:
    """Operations whose tasks the test can wait for."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.operations = Operations(self._run)
        self.log: list[str] = []
        self.has_begun = asyncio.Event()

    def begin(self, name: str, gate: asyncio.Event | None = None) -> None:
        async def operation() -> None:
            self.log.append(f"{name} begins")
            if gate is not None:
                await gate.wait()
            self.log.append(f"{name} ends")

        self.operations.begin(operation, lambda: self.log.append(f"after {name}"))

    def begin_answer(self) -> list[StoredMessage]:
        ended: list[StoredMessage] = []

        async def operation() -> None:
            ended.append(await self.operations.follow(endless_answer(self.has_begun)))

        self.operations.begin(operation, lambda: None)
        return ended

    async def finish(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)

    def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self.tasks.append(asyncio.create_task(work()))


def endless_answer(has_begun: asyncio.Event) -> LiveAnswer:
    async def pieces() -> AsyncGenerator[Piece, None]:
        has_begun.set()
        yield TextPiece("half")
        await asyncio.Event().wait()

    async def save(_: StoredMessage) -> None:
        """Nowhere."""

    empty = StoredMessage(id=1, chat_id=1, parent_id=None, role=Role.ASSISTANT, text="")
    return LiveAnswer(empty, pieces(), save)


async def test_operations_run_one_after_another() -> None:
    background, gate = Background(), asyncio.Event()
    background.begin("one", gate)
    background.begin("two")
    await asyncio.sleep(0)
    assert not background.operations.is_idle
    gate.set()
    await background.finish()
    assert background.operations.is_idle
    order = ["one begins", "one ends", "two begins", "two ends"]
    assert [entry for entry in background.log if "after" not in entry] == order
    assert {"after one", "after two"} <= set(background.log)


async def test_a_new_operation_stops_the_running_answer() -> None:
    background = Background()
    ended = background.begin_answer()
    await background.has_begun.wait()
    background.begin("next")
    await background.finish()
    assert ended[0].state is State.STOPPED
    assert background.operations.answer is None
    assert "next ends" in background.log


async def test_an_answer_that_begins_while_an_operation_waits_is_stopped_at_once() -> None:
    background = Background()
    ended = background.begin_answer()
    background.begin("next")
    await background.finish()
    assert (ended[0].state, ended[0].text) == (State.STOPPED, "")


async def test_finish_waits_for_the_running_operation() -> None:
    background = Background()
    ended = background.begin_answer()
    await background.has_begun.wait()
    async with asyncio.timeout(60):
        await background.operations.finish()
    assert ended[0].state is State.STOPPED
    await background.finish()


async def test_after_a_failed_operation_the_next_one_runs() -> None:
    background = Background()

    async def fail() -> None:
        raise ZeroDivisionError

    background.operations.begin(fail, lambda: None)
    with pytest.raises(ZeroDivisionError):
        await background.finish()
    background.tasks.clear()
    background.begin("next")
    await background.finish()
    assert background.operations.is_idle
