"""The pieces of an answer that a server writes, from its events, whatever of it is shown already."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mlxserve.history.calls import CallRecord, CallsPiece, CallState, ToolRound, round_fields
from mlxserve.history.messages import Role, State, StoredMessage
from tui.chat.followed_answer import AnswerEvents, EventQueue, FollowedAnswer
from tui.talk.errors import ChatError, ContextFull
from tui.talk.pieces import Began, ChatEvent, Finish, TextPiece, ThinkingPiece, UsagePiece

EMPTY = StoredMessage(
    id=7, chat_id=1, parent_id=6, role=Role.ASSISTANT, text="", state=State.WRITING
)
CALL = CallRecord(id="call_1", name="s__add", arguments="{}")
STATS = {
    "prompt_tokens": 313,
    "completion_tokens": 9,
    "cached_tokens": 312,
    "accepted_tokens": None,
}


def event(name: str, **data: Any) -> ChatEvent:
    return ChatEvent(name, {"id": 7, **data})


def round_event(index: int, text: str, call: CallRecord = CALL) -> ChatEvent:
    return event("round", index=index, round=round_fields(ToolRound(text, "", (call,))))


def state(**answer: Any) -> ChatEvent:
    whole = {"id": 7, "rounds": [], "thinking": "", "text": "", "request_id": "", **answer}
    return ChatEvent("state", {"answer": whole})


def end(state: State = State.DONE, error: str = "", code: str = "", cuts: str = "") -> ChatEvent:
    return event("end", state=state.value, error=error, code=code, cuts=cuts, stats=STATS)


def taken(events: AnswerEvents, *given: ChatEvent) -> list[Any]:
    return [piece for each in given for piece in events.take(each)]


def test_text_and_thinking_become_pieces_to_the_end() -> None:
    events = AnswerEvents(EMPTY)
    assert taken(
        events,
        event("request", request_id="r-1"),
        event("thinking", text="Hm"),
        event("text", text="It is "),
        event("text", text="blue."),
        end(cuts="3 of 9 pages were read"),
    ) == [
        Began("r-1"),
        ThinkingPiece("Hm"),
        TextPiece("It is "),
        TextPiece("blue."),
        Began("r-1", "3 of 9 pages were read"),
        UsagePiece(313, 9, 312),
        Finish("stop"),
    ]
    assert events.is_over


def test_what_is_shown_already_is_not_repeated() -> None:
    """A continued answer, whose events begin with the text that it had; and a state after an event."""
    events = AnswerEvents(replace(EMPTY, text="It is "))
    assert taken(events, event("text", text="It ")) == []
    assert taken(events, event("text", text="is blue")) == [TextPiece("blue")]
    assert taken(events, state(text="It is blue, and")) == [Began(None), TextPiece(", and")]
    assert taken(events, event("text", text=" red")) == [TextPiece(" red")]


def test_a_round_takes_the_text_and_its_calls_change() -> None:
    events = AnswerEvents(EMPTY)
    done = replace(CALL, state=CallState.DONE, result="42")
    assert taken(
        events,
        event("text", text="Let"),
        round_event(0, "Let me see."),
        round_event(0, "Let me see.", done),
        event("text", text="42"),
    ) == [
        TextPiece("Let"),
        TextPiece(" me see."),
        CallsPiece((CALL,), is_new=True),
        CallsPiece((done,)),
        TextPiece("42"),
    ]


def test_a_round_that_was_missed_comes_with_the_state() -> None:
    events = AnswerEvents(EMPTY)
    missed = ToolRound("Let me see.", "Hm", (CALL,))
    assert taken(
        events, event("text", text="Let"), state(rounds=[round_fields(missed)], text="42")
    ) == [
        TextPiece("Let"),
        Began(None),
        ThinkingPiece("Hm"),
        TextPiece(" me see."),
        CallsPiece((CALL,), is_new=True),
        TextPiece("42"),
    ]


def test_the_rounds_of_a_continued_answer_are_shown_once() -> None:
    done = ToolRound("Let me see.", "", (replace(CALL, state=CallState.DONE),))
    events = AnswerEvents(replace(EMPTY, text="It", rounds=(done,)))
    assert taken(events, event("text", text="Let me see.")) == []
    again = event("round", index=0, round=round_fields(done))
    assert taken(events, again, event("text", text="It is")) == [TextPiece(" is")]


@pytest.mark.parametrize("answer", [None, {"id": 8}])
def test_an_answer_that_ended_while_nobody_listened_is_over(answer: Any) -> None:
    events = AnswerEvents(EMPTY)
    assert taken(events, ChatEvent("state", {"answer": answer})) == []
    assert events.is_over


def test_each_end_is_told_as_by_a_stream() -> None:
    assert taken(AnswerEvents(EMPTY), end(State.CUT))[-1] == Finish("length")
    assert taken(AnswerEvents(EMPTY), end(State.REPEATED))[-1] == Finish("repetition")
    with pytest.raises(ChatError, match="engine failed"):
        taken(AnswerEvents(EMPTY), end(State.FAILED, "The engine failed."))
    full = end(State.FAILED, "9 tokens do not fit.", "context_length_exceeded")
    with pytest.raises(ContextFull, match="9 tokens"):
        taken(AnswerEvents(EMPTY), full)
    with pytest.raises(asyncio.CancelledError):
        taken(AnswerEvents(EMPTY), end(State.STOPPED))


class Followed:
    """An answer whose message is `stored` at its end."""

    def __init__(self, stored: StoredMessage) -> None:
        self.stops: list[str] = []
        self.queue = EventQueue(EMPTY)

        async def read(message_id: int) -> StoredMessage:
            assert message_id == EMPTY.id
            return stored

        self.answer = FollowedAnswer(
            EMPTY, self.queue, stop=lambda: self.stops.append("stop"), read_stored=read
        )


async def test_it_ends_as_it_was_stored() -> None:
    stored = replace(EMPTY, text="It is blue.", state=State.DONE)
    followed = Followed(stored)
    followed.queue.put(event("text", text="It is"))
    followed.queue.put(end())
    assert await followed.answer.run() == stored


async def test_stopping_asks_the_server_which_says_when_it_has() -> None:
    stored = replace(EMPTY, text="It is", state=State.STOPPED)
    followed = Followed(stored)
    running = asyncio.create_task(followed.answer.run())
    followed.answer.stop()
    assert followed.stops == ["stop"]
    followed.queue.put(end(State.STOPPED))
    assert await running == stored


async def test_leaving_stops_nothing() -> None:
    followed = Followed(EMPTY)
    running = asyncio.create_task(followed.answer.run())
    followed.answer.leave()
    await running
    assert followed.answer.is_left
    assert not followed.stops


async def test_an_answer_without_its_server_has_failed() -> None:
    followed = Followed(replace(EMPTY, text="It is", state=State.STOPPED))
    followed.queue.fail(ChatError("The connection was lost."))
    message = await followed.answer.run()
    assert (message.text, message.state) == ("It is", State.FAILED)
    assert message.error == "The connection was lost."
