"""`/api/v1/chats`: one store with the terminal, and nobody else's chats."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access import same_user
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.native import chats
from mlxserve.history import chat_stores
from mlxserve.history.messages import LeftOut, Role, State
from mlxserve.history.store import Store
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer

CHATS = "/api/v1/chats"
KEYS = ("key-of-alice-0000", "key-of-bob-000000")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def page(home: Path, start_server: StartServer) -> Iterator[httpx.Client]:
    """A client of the server's own user, without a key."""
    with httpx.Client(base_url=start_server().url, timeout=60) as client:
        yield client


@pytest.fixture
def terminal(home: Path) -> Iterator[Store]:
    store = Store.open(home / "chat.sqlite")
    yield store
    store.close()


@pytest.fixture
def with_key(home: Path, chat: FakeChat) -> Iterator[TestClient]:
    """Alice's client; Bob's key is the second one."""
    app = create_app(chat, access=AccessPolicy(api_keys=KEYS))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:
        yield client


BOB = {"authorization": f"Bearer {KEYS[1]}"}


def made(client: httpx.Client, title: str = "One") -> int:
    return int(client.post(CHATS, json={"title": title}).json()["id"])


def added(client: httpx.Client, chat: int, **fields: Any) -> int:
    reply = client.post(f"{CHATS}/{chat}/messages", json={"role": "user", **fields})
    assert reply.status_code == 200, reply.text
    return int(reply.json()["id"])


def test_the_terminal_reads_what_the_page_writes(page: httpx.Client, terminal: Store) -> None:
    chat = int(page.post(CHATS, json={"title": "Why?", "system": "Be short."}).json()["id"])
    question = added(page, chat, text="Why?")
    answer = added(page, chat, parent_id=question, role="assistant", state="writing", model="m")
    change = {
        "text": "Because.",
        "thinking": "Hm.",
        "state": "cut",
        "stats": {"prompt_tokens": 5, "cached_tokens": 2, "decode_seconds": 0.5},
    }
    assert page.patch(f"{CHATS}/{chat}/messages/{answer}", json=change).status_code == 200
    [record] = terminal.chats()
    assert (record.id, record.title, record.system) == (chat, "Why?", "Be short.")
    first, second = terminal.path(record.leaf_id)
    assert (first.id, first.role, first.text) == (question, Role.USER, "Why?")
    assert (second.id, second.text, second.thinking) == (answer, "Because.", "Hm.")
    assert (second.state, second.model) == (State.CUT, "m")
    assert (second.stats.prompt_tokens, second.stats.decode_seconds) == (5, 0.5)


def test_the_page_reads_what_the_terminal_writes(page: httpx.Client, terminal: Store) -> None:
    record = terminal.create_chat("A walrus question", "Be short.")
    question = terminal.add(record.id, None, Role.USER, "A walrus question")
    for text in ("One.", "Two."):
        terminal.add(record.id, question.id, Role.ASSISTANT, text, model="m")
    terminal.leave_out(record.id, LeftOut(question.id, question.id, "So far."))
    [card] = page.get(CHATS).json()["data"]
    assert (card["id"], card["title"], card["system"]) == (
        record.id,
        "A walrus question",
        "Be short.",
    )
    found = page.get(f"{CHATS}/{record.id}").json()
    assert [(one["parent_id"], one["text"]) for one in found["messages"]] == [
        (None, "A walrus question"),
        (question.id, "One."),
        (question.id, "Two."),
    ]
    assert found["leaf_id"] == found["messages"][2]["id"]
    assert found["left_out"] == {
        "last_id": question.id,
        "newest_id": question.id,
        "summary": "So far.",
    }
    [hit] = page.get(CHATS, params={"search": "WALRUS"}).json()["data"]
    assert hit["id"] == record.id
    assert "walrus" in hit["excerpt"]
    assert page.get(CHATS, params={"search": "narwhal"}).json()["data"] == []


def test_writers_at_the_same_time_lose_nothing(page: httpx.Client, terminal: Store) -> None:
    chat = made(page)
    root = added(page, chat, text="root")

    def write() -> None:
        for number in range(20):
            terminal.add(chat, root, Role.ASSISTANT, f"terminal {number}")

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(20):
        added(page, chat, parent_id=root, role="assistant", text=f"page {number}")
    writer.join()
    texts = {one["text"] for one in page.get(f"{CHATS}/{chat}").json()["messages"]}
    assert texts == {"root", *(f"{who} {n}" for who in ("page", "terminal") for n in range(20))}


def test_a_chat_is_renamed_shown_elsewhere_exported_and_deleted(page: httpx.Client) -> None:
    chat = made(page)
    question = added(page, chat, text="Q")
    first = added(page, chat, parent_id=question, role="assistant", text="A1", model="m")
    added(page, chat, parent_id=question, role="assistant", text="A2")
    change = {"title": "Named", "system": "S", "leaf_id": first}
    card = page.patch(f"{CHATS}/{chat}", json=change).json()
    assert {name: card[name] for name in change} == change
    exported = page.get(f"{CHATS}/{chat}/export")
    assert exported.headers["content-disposition"] == 'attachment; filename="chat.md"'
    assert exported.text == "# Named\n\n## System\n\nS\n\n## You\n\nQ\n\n## m\n\nA1\n"
    messages = page.get(f"{CHATS}/{chat}/export", params={"format": "json"}).json()["messages"]
    assert [one["content"] for one in messages] == ["S", "Q", "A1"]
    assert page.delete(f"{CHATS}/{chat}").json()["deleted"]
    for reply in (
        page.get(f"{CHATS}/{chat}"),
        page.delete(f"{CHATS}/{chat}"),
        page.post(f"{CHATS}/{chat}/messages", json={"role": "user", "text": "x"}),
        page.patch(f"{CHATS}/{chat}", json={"title": "x"}),
    ):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_chat"


def test_a_chat_is_pinned_and_put_into_a_folder(page: httpx.Client, terminal: Store) -> None:
    one, two = (page.post(CHATS, json={"title": title}).json()["id"] for title in ("one", "two"))
    card = page.patch(f"{CHATS}/{one}", json={"is_pinned": True, "folder": " Work "}).json()
    assert (card["folder"], card["is_pinned"]) == ("Work", True)
    assert page.patch(f"{CHATS}/{two}", json={"folder": "WORK"}).json()["folder"] == "Work"
    cards = page.get(CHATS).json()["data"]
    assert [(card["id"], card["folder"], card["is_pinned"]) for card in cards] == [
        (one, "Work", True),
        (two, "Work", False),
    ]
    assert terminal.chat(one).is_pinned
    page.patch(f"{CHATS}/{one}", json={"is_pinned": False, "folder": ""})
    assert (terminal.chat(one).folder, terminal.chat(one).is_pinned) == ("", False)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"folder": "x" * 61}, "folder", "60 characters, not 61"),
        ({"folder": "a\u202eb"}, "folder", "no invisible ones"),
        ({"folder": 7}, "folder", "string"),
        ({"is_pinned": "yes"}, "is_pinned", "bool"),
        ({"folder": "\x1b", "title": "not renamed"}, "folder", "control characters"),
    ],
)
def test_a_bad_folder_or_pin_is_refused_by_its_field(
    page: httpx.Client, change: dict[str, Any], param: str, words: str
) -> None:
    number = page.post(CHATS, json={"title": "one"}).json()["id"]
    reply = page.patch(f"{CHATS}/{number}", json=change)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert page.get(f"{CHATS}/{number}").json()["title"] == "one"


def test_an_unknown_field_is_named(page: httpx.Client) -> None:
    chat = made(page)
    answer = added(page, chat, role="assistant", text="Yes")
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", CHATS, {"title": "Two"}),
        ("PATCH", f"{CHATS}/{chat}", {"title": "Three"}),
        ("POST", f"{CHATS}/{chat}/messages", {"role": "user", "text": "x"}),
        ("PATCH", f"{CHATS}/{chat}/messages/{answer}", {"text": "No", "state": "done"}),
    ]
    for method, path, body in bodies:
        assert "x-mlxserve-warning" not in page.request(method, path, json=body).headers
        reply = page.request(method, path, json={**body, "frobnicate": 1})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-mlxserve-warning"] == "ignored unknown fields: frobnicate"


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 30, "1%2e0", "²"])
def test_what_is_no_chat_is_not_found(page: httpx.Client, number: str) -> None:
    assert page.get(f"{CHATS}/{number}").status_code == 404


def test_messages_of_another_chat_are_none_of_this_one(page: httpx.Client) -> None:
    one, two = made(page), made(page)
    question = added(page, one, text="Q")
    answer = added(page, one, parent_id=question, role="assistant", text="A")
    body = {"role": "user", "parent_id": question, "text": "x"}
    assert page.post(f"{CHATS}/{two}/messages", json=body).status_code == 400
    assert page.patch(f"{CHATS}/{two}", json={"leaf_id": answer}).status_code == 400
    change = {"text": "x", "state": "done"}
    assert page.patch(f"{CHATS}/{two}/messages/{answer}", json=change).status_code == 400
    refused = page.patch(f"{CHATS}/{one}/messages/{question}", json=change)
    assert "add another version" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"role": "system", "text": "x"}, "role"),
        ({"role": "user", "text": 1}, "text"),
        ({"role": "user", "parent_id": -1}, "parent_id"),
        ({"role": "user", "parent_id": 2**63}, "parent_id"),
        ({"role": "assistant", "state": "lost"}, "state"),
    ],
)
def test_a_bad_message_is_refused(page: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = page.post(f"{CHATS}/{made(page)}/messages", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


# ---- whose chats


def test_every_key_has_its_own(with_key: TestClient, home: Path, terminal: Store) -> None:
    terminal.create_chat("The user's own")
    chat = made(with_key, "Alice's")
    assert [one["title"] for one in with_key.get(CHATS).json()["data"]] == ["Alice's"]
    assert with_key.get(CHATS, headers=BOB).json()["data"] == []
    assert with_key.get(f"{CHATS}/{chat}", headers=BOB).status_code == 404
    assert with_key.delete(f"{CHATS}/{chat}", headers=BOB).status_code == 404
    assert with_key.get(CHATS, headers={"authorization": ""}).status_code == 401
    assert len(list((home / "chats").glob("*.sqlite"))) == 2
    assert [one.title for one in terminal.chats()] == ["The user's own"]
    for path in (home / "chats").glob("*.sqlite*"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_key_may_not_fill_the_disk(with_key: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_stores, "MAX_KEY_BYTES", 1 << 20)
    chat = made(with_key)
    reply = with_key.post(
        f"{CHATS}/{chat}/messages", json={"role": "user", "text": "some words " * 200_000}
    )
    assert reply.status_code == 503
    assert "full" in reply.json()["error"]["message"]
    assert with_key.get(f"{CHATS}/{chat}").json()["messages"] == []


def test_without_a_key_another_machine_reads_nothing(client: TestClient, home: Path) -> None:
    """The test client's address is not a loopback address."""
    for reply in (client.get(CHATS), client.post(CHATS, json={"title": "x"})):
        assert reply.status_code == 403
        assert "mlxserve key create" in reply.json()["error"]["message"]
    assert not (home / "chat.sqlite").exists()


def on_a_new_connection(page: httpx.Client) -> int:
    """The status: whose a connection is, is looked up once."""
    return httpx.get(page.base_url.join(CHATS), timeout=60).status_code


def test_another_user_of_the_machine_reads_nothing(
    page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page.get(CHATS).status_code == 200
    me = same_user.os.getuid()
    monkeypatch.setattr(same_user.os, "getuid", lambda: me + 12_345)
    monkeypatch.setattr(same_user, "ROOT", me + 12_345)
    assert on_a_new_connection(page) == 403


def test_our_processes_are_found_where_proc_is_missing(
    page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_user.sys, "platform", "darwin")
    assert page.get(CHATS).status_code == 200
    me = same_user.os.getuid()
    monkeypatch.setattr(same_user.os, "getuid", lambda: me + 12_345)
    assert on_a_new_connection(page) == 403


def test_a_damaged_file_is_a_sentence(page: httpx.Client, home: Path) -> None:
    (home / "chat.sqlite").write_bytes(b"no database " * 1_000)
    reply = page.get(CHATS)
    assert reply.status_code == 503
    assert "MLXSERVE_HOME" in reply.json()["error"]["message"]


def test_images_are_kept_with_their_question(page: httpx.Client, terminal: Store) -> None:
    chat = made(page)
    images = [{"name": "a.png", "url": "data:image/png;base64,AAAA"}]
    question = added(page, chat, text="Look", images=images)
    [kept] = page.get(f"{CHATS}/{chat}").json()["messages"]
    assert kept["images"] == images
    assert "[image: a.png]" in page.get(f"{CHATS}/{chat}/export").text
    assert terminal.message(question).images[0].content == bytes(3)


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "data:text/html;base64,AAAA", 'data:image/png;base64,"><']
)
def test_only_images_in_base64_are_kept(page: httpx.Client, url: str) -> None:
    body = {"role": "user", "text": "", "images": [{"name": "a", "url": url}]}
    reply = page.post(f"{CHATS}/{made(page)}/messages", json=body)
    assert reply.status_code == 400
    assert "images[0].url" in reply.json()["error"]["message"]


def test_another_keys_chats_do_not_wait_for_a_long_read(
    home: Path, chat: FakeChat, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key's chats made another wait 153 s: a thread for all keys read them, first come first served."""
    url = start_server(access=AccessPolicy(api_keys=KEYS)).url
    alice, bob = (
        httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"})
        for key in KEYS
    )
    reads, may_read = threading.Semaphore(0), threading.Event()
    messages = Store.messages

    def held(store: Store, *arguments: Any) -> Any:
        reads.release()
        assert may_read.wait(60)
        return messages(store, *arguments)

    monkeypatch.setattr(Store, "messages", held)
    with alice, bob, ThreadPoolExecutor(9) as pool:
        number = made(alice)
        added(alice, number, text="A")
        evil = [pool.submit(alice.get, f"{CHATS}/{number}") for _ in range(9)]
        for _ in range(3):
            assert reads.acquire(timeout=60)
        assert bob.get(CHATS).json()["data"] == []
        assert bob.post("/tokenize", json={"prompt": "x"}).status_code == 200
        may_read.set()
        assert {each.result().status_code for each in evil} == {200}


def test_a_long_chat_is_read_in_pages(page: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "MAX_PAGE", 100)
    number = made(page)
    ids = [added(page, number, text="x" * 60) for _ in range(5)]
    first = page.get(f"{CHATS}/{number}").json()
    second = page.get(f"{CHATS}/{number}", params={"after": ids[1]}).json()
    last = page.get(f"{CHATS}/{number}", params={"after": ids[3]}).json()
    shown = [[one["id"] for one in each["messages"]] for each in (first, second, last)]
    assert shown == [ids[:2], ids[2:4], ids[4:]]
    assert [each["has_more"] for each in (first, second, last)] == [True, True, False]
    assert page.get(f"{CHATS}/{number}", params={"after": "x"}).status_code == 400


def test_a_list_of_chats_ends_at_its_size(
    page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chat has a system prompt of up to 4 MiB."""
    monkeypatch.setattr(chats, "MAX_PAGE", 100)
    for _ in range(5):
        number = page.post(CHATS, json={"title": "One", "system": "x" * 60}).json()["id"]
        added(page, number, text="walrus")
    assert len(page.get(CHATS).json()["data"]) == 2
    assert len(page.get(CHATS, params={"search": "walrus"}).json()["data"]) == 2


def test_the_list_is_sent_again_only_after_a_change(with_key: TestClient) -> None:
    first = with_key.get(CHATS)
    tags = [first.headers["etag"]]
    chat = f"{CHATS}/{with_key.post(CHATS, json={'title': 'One'}).json()['id']}"
    question = {"role": "user", "text": "Why?"}

    def same(tag: str, **headers: str) -> httpx.Response:
        return with_key.get(CHATS, headers={"if-none-match": tag, **headers})

    for change in (
        lambda: None,  # the chat that was made
        lambda: with_key.post(f"{chat}/messages", json=question),
        lambda: with_key.patch(chat, json={"title": "Two"}),
        lambda: with_key.patch(chat, json={"system": "Be brief."}),
        lambda: with_key.patch(chat, json={"is_pinned": True}),
        lambda: with_key.patch(chat, json={"folder": "Work"}),
        lambda: with_key.delete(chat),
    ):
        change()
        reply = same(tags[-1])
        assert reply.status_code == 200
        assert reply.json() == with_key.get(CHATS).json()
        tags.append(reply.headers["etag"])
        for known in (tags[-1], f'"another", {tags[-1].removeprefix("W/")}'):
            reply = same(known)
            assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", tags[-1])
    assert tags[-1] == tags[0], "the list is empty again"
    assert len(set(tags)) == len(tags) - 1
    assert same(tags[1], **BOB).json()["data"] == []
    assert "etag" not in with_key.get(CHATS, params={"search": "one"}).headers
