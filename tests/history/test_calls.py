from dataclasses import replace

from mlxserve.history.calls import (
    CallRecord,
    CallState,
    ToolRound,
    round_messages,
    rounds_markdown,
    rounds_of,
    rounds_text,
)
from mlxserve.history.messages import Role, StoredMessage, wire_messages
from mlxserve.history.store import Store


def called(state: CallState, result: str = "") -> CallRecord:
    return CallRecord(
        id="1", name="t", arguments='{"a": 1}', state=state, result=result, seconds=0.5
    )


ROUND = ToolRound("Look:", "hm", (called(CallState.DONE, "42"),))


def test_rounds_are_kept_with_their_message(store: Store) -> None:
    assert rounds_of(rounds_text((ROUND,))) == (ROUND,)
    assert rounds_of(rounds_text(())) == ()
    chat = store.create_chat("hi")
    message = store.add(chat.id, None, Role.ASSISTANT, "")
    store.save(replace(message, rounds=(ROUND,)))
    assert store.message(message.id).rounds == (ROUND,)


def test_images_of_a_result_are_kept_and_sent_after_its_text(store: Store) -> None:
    url = "data:image/png;base64,aGk="
    seen = ToolRound("", "", (replace(called(CallState.DONE, "a plot"), images=(url,)),))
    assert rounds_of(rounds_text((seen,))) == (seen,)
    assert "images" not in rounds_text((ROUND,))
    [_, result] = round_messages(seen)
    assert result["content"] == [
        {"type": "text", "text": "a plot"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def test_every_call_has_a_result_in_a_request() -> None:
    expected = {
        CallState.DONE: "42",
        CallState.REFUSED: "The user did not allow this call.",
        CallState.STOPPED: "The user stopped this call.",
        CallState.RUNNING: "The user stopped this call.",  # its window was killed
    }
    for state, content in expected.items():
        one = ToolRound("", "", (called(state, "42" if state is CallState.DONE else ""),))
        assert round_messages(one)[-1]["content"] == content
    assert "reasoning_content" not in round_messages(ROUND)[0]


def test_an_answer_is_sent_with_its_rounds() -> None:
    answer = StoredMessage(
        id=1, chat_id=1, parent_id=None, role=Role.ASSISTANT, text="It is 42.", rounds=(ROUND,)
    )
    assert [m["role"] for m in wire_messages([answer], "s")] == [
        *("system", "assistant", "tool", "assistant")
    ]


def test_open_calls_of_an_ended_answer_are_stopped() -> None:
    one = ToolRound("", "", (called(CallState.RUNNING), called(CallState.DONE)))
    assert [call.state for call in one.ended().calls] == [CallState.STOPPED, CallState.DONE]


def test_an_export_has_results_in_fences_that_they_cannot_end() -> None:
    one = ToolRound("Look:", "", (called(CallState.DONE, "```\nx"),))
    assert rounds_markdown([one]) == ('Look:\n\nCalled `t` with `{"a": 1}`:\n\n````\n```\nx\n````')
