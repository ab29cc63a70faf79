"""By which conversations the pages of a deleted chat are found, and which of other chats keep theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import LeftOut, Role, State
from mlxserve.history.store import Store
from mlxserve.history.traces import traces


def chat(store: Store, *texts: str, system: str = "", parent: int | None = None) -> int:
    """A chat of alternating questions and answers; its id."""
    chat_id = store.create_chat(texts[0], system).id
    add(store, chat_id, *texts, parent=parent)
    return chat_id


def add(store: Store, chat_id: int, *texts: str, parent: int | None = None) -> list[int]:
    ids = []
    for number, text in enumerate(texts):
        role = Role.ASSISTANT if number % 2 else Role.USER
        model = "m" if number % 2 else ""
        parent = store.add(chat_id, parent, role, text, model=model).id
        ids.append(parent)
    return ids


def said(conversation: list[dict[str, object]]) -> list[object]:
    return [message["content"] for message in conversation]


def test_every_branch_is_a_conversation(store: Store) -> None:
    chat_id = store.create_chat("one", "Be kind.").id
    question, _, _, _ = add(store, chat_id, "one", "1", "two", "2")
    store.add(chat_id, question, Role.ASSISTANT, "uno", model="other")
    found = traces(store, chat_id)
    assert [said(one) for one in found.conversations] == [
        ["Be kind.", "one", "uno"],
        ["Be kind.", "one", "1", "two", "2"],
    ]
    assert found.kept == []
    assert found.models == ["m", "other"]


def test_what_later_prompts_leave_out_is_a_conversation_of_its_own(store: Store) -> None:
    chat_id = store.create_chat("one").id
    _, first, second, last = add(store, chat_id, "one", "1", "two", "2")
    calls = (CallRecord(id="c", name="f", arguments="{}", state=CallState.DONE, result="42"),)
    store.save(replace(store.message(first), thinking="Hm.", rounds=(ToolRound("", "Ah.", calls),)))
    found = traces(store, chat_id)
    _, answered = found.conversations
    assert [message["role"] for message in answered] == ["user", "assistant", "tool", "assistant"]
    assert answered[1]["reasoning_content"] == "Ah."
    assert answered[3] == {"role": "assistant", "content": "1", "reasoning_content": "Hm."}
    store.leave_out(chat_id, LeftOut(first, last, "They counted."))
    assert any(
        said(one)[0] == "Summary of the conversation so far:\nThey counted." and len(one) == 3
        for one in traces(store, chat_id).conversations
    )
    assert second


def test_a_question_without_an_answer_is_a_conversation(store: Store) -> None:
    chat_id = store.create_chat("one").id
    [question] = add(store, chat_id, "one")
    store.add(chat_id, question, Role.ASSISTANT, "", state=State.FAILED, model="m")
    assert [said(one) for one in traces(store, chat_id).conversations] == [["one"]]


def test_of_other_chats_the_one_that_begins_most_alike_is_kept(store: Store) -> None:
    chat(store, "something else", "1")
    chat(store, "one", "1", "two", "2")
    chat(store, "one", "1", "three", "3")
    gone = chat(store, "one", "1", "two", "zwei")
    assert [said(one) for one in traces(store, gone).kept] == [["one", "1", "two", "2"]]
    alone = chat(store, "some day", "1")
    assert [said(one) for one in traces(store, alone).kept] == [["something else"]]


def test_the_system_prompt_counts(store: Store) -> None:
    chat(store, "one", "1", system="Be kind.")
    chat(store, "two", "2", system="Be short.")
    gone = chat(store, "one", "1", system="Be short.")
    assert [said(one) for one in traces(store, gone).kept] == [["Be short.", "two"]]


def test_an_empty_chat_has_left_nothing_and_one_that_is_gone_says_so(store: Store) -> None:
    chat_id = store.create_chat("one").id
    assert traces(store, chat_id).conversations == []
    store.delete(chat_id)
    with pytest.raises(StoreError):
        traces(store, chat_id)
