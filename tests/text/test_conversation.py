"""Calls and their results, where a dialect has no ids."""

from __future__ import annotations

from mlxserve.text.conversation import ASSISTANT, TOOL, USER, Call, Conversation, Message


def answer(*calls: Call) -> Message:
    return Message(role=ASSISTANT, calls=calls)


def result(text: str, *, name: str | None = None, call_id: str | None = None) -> Message:
    return Message(role=TOOL, text=text, name=name, call_id=call_id)


def pairs(*messages: Message) -> list[tuple[str | None, str]]:
    """(id, text) of the results."""
    found = Conversation.from_messages(messages).messages
    return [(one.call_id, one.text) for one in found if one.role == TOOL]


READ, LIST = Call("", "read", "{}"), Call("", "list", "{}")


def test_results_answer_calls_of_their_names_or_in_order() -> None:
    calls = answer(READ, LIST, READ)
    named = [result("1", name="list"), result("2", name="read"), result("3", name="read")]
    assert pairs(calls, *named) == [("call_1", "1"), ("call_0", "2"), ("call_2", "3")]
    unnamed = [result(text) for text in "123"]
    assert pairs(calls, *unnamed) == [("call_0", "1"), ("call_1", "2"), ("call_2", "3")]


def test_ids_that_are_known_stay() -> None:
    calls = answer(Call("call_0", "read", "{}"), READ)
    assert [call.id for call in Conversation.from_messages([calls]).messages[0].calls] == [
        "call_0",
        "call_1",
    ]
    assert pairs(calls, result("x", call_id="call_0"), result("y")) == [
        ("call_0", "x"),
        ("call_1", "y"),
    ]


def test_a_result_belongs_to_the_last_answer() -> None:
    later = [answer(READ), result("1"), Message(role=USER, text="Again"), answer(READ)]
    assert pairs(*later, result("2")) == [("call_0", "1"), ("call_1", "2")]
    assert pairs(answer(READ), answer(LIST), result("x", name="read")) == [(None, "x")]
    assert pairs(answer(READ), result("1"), result("2")) == [("call_0", "1"), (None, "2")]
    assert pairs(result("x")) == [(None, "x")]


def test_a_longer_conversation_begins_with_the_same_ids() -> None:
    short = [answer(READ), result("1")]
    longer = [*short, answer(LIST), result("2")]
    first, second = (Conversation.from_messages(messages).messages for messages in (short, longer))
    assert second[: len(first)] == first
