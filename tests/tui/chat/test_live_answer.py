import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from mlxserve.history.calls import CallRecord, CallsPiece, CallState, ToolRound
from mlxserve.history.messages import Role, State, StoredMessage
from tui.chat import live_answer as answer_module
from tui.chat.live_answer import AnswerPhase, LiveAnswer, NewText
from tui.talk.errors import ChatError
from tui.talk.pieces import Finish, Piece, TextPiece, ThinkingPiece, ToolPiece, UsagePiece

EMPTY = StoredMessage(
    id=2, chat_id=1, parent_id=1, role=Role.ASSISTANT, text="", state=State.WRITING
)


Given = Piece | CallsPiece | Exception | None  # None: the end


class Clock:
    """Time that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Story:
    """An answer that gets its pieces one by one, and every message that was saved."""

    def __init__(self) -> None:
        self.saved: list[StoredMessage] = []
        self.was_saved = asyncio.Event()
        self.is_closed = False
        self.clock = Clock()
        self._pieces: asyncio.Queue[Given] = asyncio.Queue()
        self.answer = LiveAnswer(EMPTY, self._stream(), self._save, self.clock)

    async def give(self, *pieces: Given) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)
        await self._pieces.join()

    async def _stream(self) -> AsyncGenerator[Piece | CallsPiece, None]:
        try:
            while True:
                piece = await self._pieces.get()
                if not isinstance(piece, Piece | CallsPiece):
                    self._pieces.task_done()
                if piece is None:
                    return
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                self._pieces.task_done()
        finally:
            self.is_closed = True

    async def _save(self, message: StoredMessage) -> None:
        self.saved.append(message)
        self.was_saved.set()


def begun() -> tuple[Story, asyncio.Task[StoredMessage]]:
    story = Story()
    return story, asyncio.create_task(story.answer.run())


async def answer_of(*pieces: Given) -> tuple[StoredMessage, Story]:
    """The message that these pieces make."""
    story, task = begun()
    await story.give(*pieces)
    return await task, story


async def test_pieces_make_a_message_and_it_is_saved() -> None:
    message, story = await answer_of(
        *(ThinkingPiece("h"), ThinkingPiece("m"), TextPiece("Hel"), TextPiece("lo")),
        *(Finish("stop"), None),
    )
    assert (message.text, message.thinking, message.state) == ("Hello", "hm", State.DONE)
    assert story.saved[-1] == message


async def test_an_answer_at_the_length_limit_is_cut_off() -> None:
    message, _ = await answer_of(TextPiece("a"), Finish("length"), None)
    assert message.state is State.CUT


async def test_a_failure_keeps_the_text_so_far() -> None:
    message, story = await answer_of(TextPiece("half"), ChatError("It broke. Try again."))
    assert (message.text, message.state) == ("half", State.FAILED)
    assert message.error == "It broke. Try again."
    assert story.saved[-1] == message


async def test_a_stop_keeps_the_text_so_far_and_closes_the_stream() -> None:
    story, task = begun()
    await story.give(TextPiece("half"))
    story.answer.stop()
    message = await task
    assert (message.text, message.state) == ("half", State.STOPPED)
    assert story.saved[-1] == message
    assert story.is_closed


async def test_a_stop_before_the_run_counts() -> None:
    story = Story()
    story.answer.stop()
    assert (await story.answer.run()).state is State.STOPPED


async def test_cancelling_the_run_keeps_the_text_so_far() -> None:
    story, task = begun()
    await story.give(TextPiece("half"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (story.saved[-1].text, story.saved[-1].state) == ("half", State.STOPPED)
    assert story.is_closed


async def test_it_is_saved_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "CHECKPOINT_SECONDS", 0.01)

    story, task = begun()
    await story.give(TextPiece("half"))
    async with asyncio.timeout(60):
        await story.was_saved.wait()
    assert (story.saved[0].text, story.saved[0].state) == ("half", State.WRITING)
    await story.give(Finish("stop"), None)
    await task


async def test_take_returns_the_new_text() -> None:
    story, task = begun()
    await story.give(ThinkingPiece("t"), TextPiece("a"), TextPiece("b"))
    assert story.answer.take() == NewText("ab", "t")
    assert story.answer.take() == NewText()
    await story.give(TextPiece("c"))
    assert story.answer.take() == NewText("c")
    assert story.answer.taken() == NewText("abc", "t")
    await story.give(None)
    await task


async def test_the_phase_follows_the_pieces() -> None:
    story, task = begun()
    phases = [story.answer.phase]
    for piece in (ThinkingPiece("t"), TextPiece("a")):
        await story.give(piece)
        phases.append(story.answer.phase)
    await story.give(None)
    await task
    phases.append(story.answer.phase)
    assert phases == [
        AnswerPhase.WAITING,
        AnswerPhase.THINKING,
        AnswerPhase.WRITING,
        AnswerPhase.ENDED,
    ]


async def test_statistics_are_measured_from_the_first_piece() -> None:
    story, task = begun()
    story.clock.now += 0.5
    await story.give(ThinkingPiece("t"))
    story.clock.now += 2.0
    await story.give(TextPiece("a"))
    stats = story.answer.stats
    assert (stats.first_token_seconds, stats.decode_seconds) == (0.5, 2.0)
    assert stats.completion_tokens == 2
    await story.give(Finish("stop"), UsagePiece(60, 21, 50), None)
    stats = (await task).stats
    assert (stats.completion_tokens, stats.cached_tokens) == (21, 50)
    assert stats.tokens_per_second == 10.0


async def test_a_tool_call_is_shown() -> None:
    message, _ = await answer_of(
        ToolPiece(0, "look", ""),
        ToolPiece(0, "", '{"at"'),
        ToolPiece(0, "", ":1}"),
        Finish("tool_calls"),
        None,
    )
    assert 'look({"at":1})' in message.text


async def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        await answer_of(ZeroDivisionError("a bug"))


async def test_a_round_of_calls_takes_the_text_and_the_next_one_is_measured_anew() -> None:
    asked = CallRecord(id="1", name="t", arguments="{}")
    done = replace(asked, state=CallState.DONE, result="42", seconds=0.1)
    message, _ = await answer_of(
        ThinkingPiece("hm"),
        TextPiece("Look:"),
        ToolPiece(0, "t", "{}", "1"),
        UsagePiece(10, 90, 0),
        CallsPiece((asked,), is_new=True),
        CallsPiece((done,)),
        TextPiece("It is 42."),
        Finish("stop"),
        None,
    )
    assert message.rounds == (ToolRound("Look:", "hm", (done,)),)
    assert (message.text, message.thinking, message.state) == ("It is 42.", "", State.DONE)
    assert (message.stats.prompt_tokens, message.stats.completion_tokens) == (10, 1)


async def test_calls_of_an_answer_that_fails_are_stopped() -> None:
    call = CallRecord(id="1", name="t", arguments="{}")
    failure = ChatError("The server failed.")
    message, _ = await answer_of(CallsPiece((call,), is_new=True), failure)
    assert message.state is State.FAILED
    assert message.rounds[0].calls[0].state is CallState.STOPPED
