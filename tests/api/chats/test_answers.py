"""Answers that the server writes: begun, followed, stopped, continued, and kept on the disk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.chats import feed, live_chats
from mlxserve.core.errors import OutOfMemory, PromptTooLong
from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.chats.following import PATIENCE, Follower, text_of
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import Running, StartServer, serving
from tests.waiting import wait_until

CHATS = "/api/v1/chats"
END = Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0))
SLOW = [Delta("Begun ", (66,)), HOLD, Delta("ended", (69,)), END]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def server(home: Path, start_server: StartServer) -> Running:
    return start_server()


@pytest.fixture
def page(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def disk(home: Path) -> Iterator[Store]:
    store = Store.open(home / "chat.sqlite")
    yield store
    store.close()


def made(client: httpx.Client, **fields: Any) -> int:
    return int(client.post(CHATS, json={"title": "One", **fields}).json()["id"])


def asked(client: httpx.Client, chat: int, **fields: Any) -> dict[str, Any]:
    reply = client.post(f"{CHATS}/{chat}/answers", json=fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def read(client: httpx.Client, chat: int) -> dict[str, Any]:
    return dict(client.get(f"{CHATS}/{chat}").json())


def ended(client: httpx.Client, chat: int) -> dict[str, Any]:
    """The chat once its last answer has ended."""
    wait_until(lambda: read(client, chat)["messages"][-1]["state"] != "writing", PATIENCE)
    return read(client, chat)


def test_an_answer_goes_on_when_its_client_leaves_and_followers_see_it(
    server: Running, chat: FakeChat
) -> None:
    chat.script = SLOW
    with httpx.Client(base_url=server.url, timeout=60) as client:
        number = made(client, system="Be kind.")
        follower = Follower(server.url, number)
        follower.wait_for("state")
        begun = asked(client, number, text="Why?", temperature=0.5)
    question, answer = begun["question"]["id"], begun["answer"]["id"]
    follower.wait_for("blocks")
    late = Follower(server.url, number)
    late.wait_for("state", lambda data: "Begun" in text_of(data["answer"]["blocks"]))
    chat.release()
    chat.wait_until_closed()
    for each in (follower, late):
        end = each.wait_for("end")
        assert (end["id"], end["state"], end["stats"]["completion_tokens"]) == (answer, "done", 9)
        assert text_of(each.blocks) == "Begun ended"
        each.close()
    [rendered] = chat.rendered
    assert [(one["role"], one["content"]) for one in rendered.messages] == [
        ("system", "Be kind."),
        ("user", "Why?"),
    ]
    assert chat.submitted[0].params.temperature == 0.5
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = read(client, number)
    assert [
        (one["id"], one["parent_id"], one["text"], one["state"]) for one in found["messages"]
    ] == [
        (question, None, "Why?", "done"),
        (answer, question, "Begun ended", "done"),
    ]


def test_a_follower_that_comes_back_gets_what_it_missed_and_no_more(
    server: Running, chat: FakeChat, page: httpx.Client
) -> None:
    chat.script = SLOW
    number = made(page)
    stays, leaves = Follower(server.url, number), Follower(server.url, number)
    for each in (stays, leaves):
        each.wait_for("state")
    asked(page, number, text="Why?")
    leaves.wait_for("blocks")
    leaves.close()
    chat.release()
    stays.wait_for("chat", lambda data: stays.of("end"))
    wait_until(lambda: stays.events[-1][0] == "chat", PATIENCE)
    back = Follower(server.url, number, after=leaves)
    wait_until(lambda: len(leaves.events) + len(back.events) == len(stays.events), PATIENCE)
    assert leaves.events + back.events == stays.events
    assert text_of(back.blocks) == "Begun ended"
    stays.last_id = "0-1"  # of another server
    other = Follower(server.url, number, after=stays)
    assert other.wait_for("state")["answer"] is None
    for each in (stays, back, other):
        each.close()


def test_any_follower_stops_an_answer_and_continues_it(
    server: Running, chat: FakeChat, page: httpx.Client
) -> None:
    chat.script = SLOW
    number = made(page)
    answer = asked(page, number, text="Why?")["answer"]["id"]
    chat.on_hold.wait(PATIENCE)
    busy = page.post(f"{CHATS}/{number}/answers", json={"text": "x", "leaf_id": answer})
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "answer_running")
    with httpx.Client(base_url=server.url, timeout=60) as other:
        assert other.delete(f"{CHATS}/{number}/answers/{answer}").status_code == 200
    chat.wait_until_closed()
    found = ended(page, number)
    assert (found["messages"][1]["text"], found["messages"][1]["state"]) == ("Begun ", "stopped")
    wait_until(
        lambda: page.delete(f"{CHATS}/{number}/answers/{answer}").status_code == 404, PATIENCE
    )
    chat.script = [Delta("and ended.", (69,)), END]
    asked(page, number, leaf_id=answer, continues=answer)
    found = ended(page, number)
    assert [one["text"] for one in found["messages"]] == ["Why?", "Begun and ended."]
    assert found["messages"][1]["state"] == "done"
    assert [one["role"] for one in chat.rendered[-1].messages] == ["user", "assistant"]


def test_a_stale_write_changes_nothing_and_gets_409(chat: FakeChat, page: httpx.Client) -> None:
    number = made(page)
    first = asked(page, number, text="Why?")["answer"]["id"]
    ended(page, number)
    stale: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "answers", {"text": "And?"}),
        ("POST", "answers", {"text": "And?", "leaf_id": first - 1, "parent_id": first}),
        ("POST", "messages", {"role": "user", "text": "And?", "seen_leaf_id": first - 1}),
    ]
    for method, path, body in stale:
        reply = page.request(method, f"{CHATS}/{number}/{path}", json=body)
        assert reply.status_code == 409, path
        assert reply.json()["error"]["code"] == "stale_chat"
    reply = page.patch(f"{CHATS}/{number}", json={"leaf_id": first, "seen_leaf_id": first - 1})
    assert reply.status_code == 409
    assert len(read(page, number)["messages"]) == 2
    asked(page, number, text="And?", leaf_id=first, parent_id=first)
    found = ended(page, number)
    assert [one["text"] for one in found["messages"]] == ["Why?", "Hello", "And?", "Hello"]


def test_an_answer_is_made_again_beside_the_first(chat: FakeChat, page: httpx.Client) -> None:
    number = made(page)
    begun = asked(page, number, text="Why?")
    ended(page, number)
    question, first = begun["question"]["id"], begun["answer"]["id"]
    second = asked(page, number, leaf_id=first, parent_id=question)
    assert second["question"] is None
    found = ended(page, number)
    assert [one["parent_id"] for one in found["messages"]] == [None, question, question]
    assert found["leaf_id"] == second["answer"]["id"]


def test_another_answer_that_fails_leaves_the_one_that_was_shown(
    chat: FakeChat, page: httpx.Client
) -> None:
    number = made(page)
    begun = asked(page, number, text="Why?")
    ended(page, number)
    question, first = begun["question"]["id"], begun["answer"]["id"]
    chat.submit_error = OutOfMemory("It does not fit.")
    asked(page, number, leaf_id=first, parent_id=question, model="other")
    found = ended(page, number)
    assert (found["messages"][-1]["state"], found["messages"][-1]["error"]) == (
        "failed",
        "It does not fit.",
    )
    wait_until(lambda: read(page, number)["leaf_id"] == first, PATIENCE)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"continues": 1, "text": "x"}, "continues"),
        ({"parent_id": 99}, "parent_id"),
        ({"text": "x", "parent_id": 99}, "parent_id"),
        ({"continues": 99}, "continues"),
        ({"text": 5}, "text"),
        ({"text": "x", "temperature": -1.0}, "temperature"),
    ],
)
def test_a_bad_body_is_refused_by_its_field(
    page: httpx.Client, body: dict[str, Any], param: str
) -> None:
    reply = page.post(f"{CHATS}/{made(page)}/answers", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_refusal_of_the_model_fails_the_answer_and_leaves_the_branch(
    server: Running, chat: FakeChat, page: httpx.Client
) -> None:
    number = made(page)
    asked(page, number, text="Why?")
    leaf = ended(page, number)["leaf_id"]
    follower = Follower(server.url, number)
    follower.wait_for("state")
    asked(page, number, text="x" * chat.max_model_len, leaf_id=leaf, parent_id=leaf)
    end = follower.wait_for("end")
    assert end["state"] == "failed"
    assert "context" in end["error"]
    assert follower.wait_for("chat", lambda card: card["leaf_id"] == leaf)
    follower.close()


def test_what_is_written_is_on_the_disk_while_it_grows(
    chat: FakeChat, page: httpx.Client, disk: Store
) -> None:
    chat.script = SLOW
    answer = asked(page, made(page), text="Why?")["answer"]["id"]
    chat.on_hold.wait(PATIENCE)
    wait_until(lambda: disk.message(answer).text == "Begun ", PATIENCE)
    assert disk.message(answer).state is State.WRITING
    assert disk.recover() == 0, "its server lives"
    chat.release()
    wait_until(lambda: disk.message(answer).state is State.DONE, PATIENCE)


def test_an_answer_of_a_server_that_was_killed_is_continued_before_the_chat_is_read(
    chat: FakeChat, page: httpx.Client, disk: Store, home: Path
) -> None:
    """As a page does that was open all the time."""
    number = made(page)
    question = disk.add(number, None, Role.USER, "Why?")
    answer = disk.add(number, question.id, Role.ASSISTANT, "Begun ", state=State.WRITING)
    with closing(sqlite3.connect(home / "chat.sqlite")) as file, file:
        file.execute("UPDATE messages SET touched_at = 0 WHERE id = ?", (answer.id,))
    chat.script = [Delta("and ended.", (69,)), END]
    asked(page, number, leaf_id=answer.id, continues=answer.id)
    assert ended(page, number)["messages"][1]["text"] == "Begun and ended."


def test_a_server_that_stops_keeps_the_answer_as_stopped(chat: FakeChat, disk: Store) -> None:
    chat.script = SLOW
    with serving(chat) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        answer = asked(client, made(client), text="Why?")["answer"]["id"]
        chat.on_hold.wait(PATIENCE)
    message = disk.message(answer)
    assert message.text == "Begun "
    assert message.state in (State.STOPPED, State.FAILED)


def test_titles_branches_and_the_end_of_a_chat_are_told(
    server: Running, page: httpx.Client
) -> None:
    number = made(page)
    follower = Follower(server.url, number)
    follower.wait_for("state")
    page.patch(f"{CHATS}/{number}", json={"title": "Two"})
    assert follower.wait_for("chat")["title"] == "Two"
    page.post(f"{CHATS}/{number}/messages", json={"role": "user", "text": "Hm"})
    assert follower.wait_for("message")["text"] == "Hm"
    page.delete(f"{CHATS}/{number}")
    follower.wait_for("deleted")
    follower.close()
    reply = page.get(f"{CHATS}/{number}/events")
    assert reply.status_code == 404


def test_a_deleted_chat_has_no_answer_any_more(
    chat: FakeChat, page: httpx.Client, disk: Store
) -> None:
    chat.script = SLOW
    number = made(page)
    asked(page, number, text="Why?")
    chat.on_hold.wait(PATIENCE)
    assert page.delete(f"{CHATS}/{number}").status_code == 200
    chat.wait_until_closed()
    assert disk.chats() == []


def test_drafts_are_kept_by_chat_until_they_are_sent(page: httpx.Client) -> None:
    one, two = made(page), made(page)
    for number, text in ((one, "first"), (two, "second")):
        assert page.patch(f"{CHATS}/{number}", json={"draft": text}).status_code == 200
    assert [read(page, number)["draft"] for number in (one, two)] == ["first", "second"]
    asked(page, one, text="first")
    assert [read(page, number)["draft"] for number in (one, two)] == ["", "second"]
    page.delete(f"{CHATS}/{two}")
    assert read(page, made(page))["draft"] == "", "ids are used again"


def may_follow(client: httpx.Client, chat: int) -> bool:
    with client.stream("GET", f"{CHATS}/{chat}/events") as reply:
        return reply.status_code == 200


def refused_to_follow(client: httpx.Client, chat: int) -> str:
    """The code of the refusal; what is let in sends events without end."""
    with client.stream("GET", f"{CHATS}/{chat}/events") as reply:
        assert reply.status_code == 429
        return str(json.loads(reply.read())["error"]["code"])


def test_followers_are_limited_by_chat_and_by_owner(
    server: Running, page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_FOLLOWERS", 1)
    number = made(page)
    follower = Follower(server.url, number)
    follower.wait_for("state")
    assert refused_to_follow(page, number) == "too_many_followers"
    monkeypatch.setattr(live_chats, "MAX_FOLLOWERS", 1)
    assert refused_to_follow(page, made(page)) == "too_many_followers"
    follower.close()


def test_nobody_else_follows_stops_or_asks(
    home: Path, chat: FakeChat, start_server: StartServer
) -> None:
    keys = ("key-of-alice-0000", "key-of-bob-000000")
    chat.script = SLOW
    url = start_server(access=AccessPolicy(api_keys=keys)).url
    alice, bob = (
        httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"})
        for key in keys
    )
    with alice, bob:
        number = made(alice)
        answer = asked(alice, number, text="Why?")["answer"]["id"]
        chat.on_hold.wait(PATIENCE)
        path = f"{CHATS}/{number}"
        assert bob.get(f"{path}/events").status_code == 404
        assert bob.delete(f"{path}/answers/{answer}").status_code == 404
        assert bob.post(f"{path}/answers", json={"text": "x"}).status_code == 404
        chat.release()
        assert ended(alice, number)["messages"][1]["text"] == "Begun ended"


def test_a_follower_gets_the_text_in_its_own_form_and_goes_on_in_it(
    server: Running, chat: FakeChat, page: httpx.Client
) -> None:
    chat.script = [Delta("# Begun ", (66,)), HOLD, Delta("*ended*", (69,)), END]
    number = made(page)
    stays, leaves = (Follower(server.url, number, form="text") for _ in range(2))
    parsed = Follower(server.url, number)
    for each in (stays, leaves, parsed):
        assert each.wait_for("state")["store"] == stays.wait_for("state")["store"] != ""
    asked(page, number, text="Why?")
    leaves.wait_for("text")
    leaves.close()
    parsed.wait_for("blocks")
    chat.release()
    for each in (stays, parsed):
        each.wait_for("end")
    back = Follower(server.url, number, after=leaves, form="text")
    back.wait_for("end")
    assert (stays.text, back.text) == ("# Begun *ended*",) * 2
    assert not back.of("state")
    assert not stays.of("blocks")
    assert not parsed.of("text")
    assert text_of(parsed.blocks) == "Begun ended"
    for each in (stays, parsed, back):
        each.close()
    refused = page.get(f"{CHATS}/{number}/events", params={"form": "html"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "form")


def test_a_follower_of_a_form_that_nobody_had_begins_with_the_state(
    server: Running, chat: FakeChat, page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_FOLLOWERS", 2)
    chat.script = SLOW
    number = made(page)
    stays, leaves = Follower(server.url, number), Follower(server.url, number, form="text")
    for each in (stays, leaves):
        each.wait_for("state")
    asked(page, number, text="Why?")
    leaves.wait_for("text")
    leaves.close()
    wait_until(lambda: may_follow(page, number), PATIENCE, "the server still has both")
    chat.release()
    stays.wait_for("end")
    monkeypatch.setattr(
        feed, "MAX_FOLLOWERS", 9
    )  # the follower that asked for room may not have left
    back = Follower(server.url, number, after=leaves, form="text")
    assert back.wait_for("state")["answer"] is None, "its last event has no text after it"
    for each in (stays, back):
        each.close()


def test_an_answer_has_the_sampling_that_the_terminal_sets(
    chat: FakeChat, page: httpx.Client
) -> None:
    number = made(page)
    asked(page, number, text="Why?", top_k=3, min_p=0.25, seed=-1, reasoning_effort="low")
    ended(page, number)
    [submitted] = chat.submitted
    assert (submitted.params.top_k, submitted.params.min_p) == (3, 0.25)
    assert submitted.params.seed == -1


def test_a_refused_question_says_why_in_a_code(
    server: Running, chat: FakeChat, page: httpx.Client
) -> None:
    chat.submit_error = PromptTooLong("Too long.", num_tokens=9, max_model_len=8)
    number = made(page)
    follower = Follower(server.url, number)
    follower.wait_for("state")
    asked(page, number, text="Why?")
    end = follower.wait_for("end")
    assert (end["state"], end["code"]) == ("failed", "context_length_exceeded")
    follower.close()
