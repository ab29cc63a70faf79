"""Pages that follow one chat: the server writes its answers, whichever page asked."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from mlxserve.api.chats import answer_writer, file_watch
from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.chats.following import Follower, text_of
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer, serving
from tests.waiting import until, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Request

pytestmark = pytest.mark.slow

END = Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0))
SLOW = [Delta("Begun ", (66,)), HOLD, Delta("ended", (69,)), END]
PARAGRAPHS = "\n\n".join(
    f"Paragraph {number} has **bold** words, `code` and a [link](https://example.org/{number}), "
    "and it goes on for a while, as the answers of a talkative model do, with many more words."
    for number in range(190)
)
CODE = "\n\n```python\n" + "def f(x):\n    return x + 1  # more\n" * 150 + "```\n\n"
LARGE = (
    PARAGRAPHS[:22_000]
    + CODE
    + "| a | b |\n|---|---|\n"
    + "| one | two |\n" * 100
    + "\n"
    + PARAGRAPHS[:21_000]
)
MAX_WIRE = 120_000  # bytes


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def open_first(seen: Visit) -> None:
    seen.until("Ready")
    seen.page.evaluate("dispatchEvent(new Event('focus'))")  # as when its window is chosen
    seen.page.locator("#chat-list .open").first.click()
    seen.page.locator(".message").first.wait_for()


def test_two_pages_show_one_answer_which_ends_whole_without_the_page_that_asked(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    url = start_server().url
    chat.script = SLOW
    with visit(url) as stays:
        with visit(url) as asks:
            asks.until("Ready")
            asks.ask("one")
            asks.until_text(".assistant .body", "Begun")
            open_first(stays)
            stays.until_text(".assistant .body", "Begun")
            asks.reload()
            asks.until_text(".assistant .body", "Begun")
        chat.release()
        stays.wait_for_answers(1)
        assert stays.texts == ["one", "Begun ended"]
        assert len(chat.rendered) == 1
        assert stays.errors == []


def test_what_one_page_asks_the_other_shows_and_the_next_question_follows_it(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    url = start_server().url
    with visit(url) as one, visit(url) as two:
        one.until("Ready")
        one.ask("first")
        one.wait_for_answers(1)
        open_first(two)
        one.ask("second")
        two.wait_for_answers(2)
        assert two.texts == ["first", "Hello", "second", "Hello"]
        two.ask("third")
        one.wait_for_answers(3)
        assert [message["content"] for message in chat.rendered[-1].messages] == [
            "first",
            "Hello",
            "second",
            "Hello",
            "third",
        ]
        assert one.texts == two.texts
        one.page.on("dialog", lambda dialog: dialog.accept("Renamed"))
        one.choose("Rename")
        two.page.wait_for_function("() => document.title.startsWith('Renamed')")
        assert one.errors == two.errors == []


def test_any_page_stops_an_answer_and_continues_it(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    url = start_server().url
    chat.script = SLOW
    with visit(url) as one, visit(url) as two:
        one.until("Ready")
        one.ask("one")
        one.until_text(".assistant .body", "Begun")
        open_first(two)
        two.page.click("#stop")
        for seen in (one, two):
            seen.until_text(".assistant .note", "stopped")
        chat.wait_until_closed()
        chat.script = [Delta("and ended", (69,)), END]
        one.page.get_by_role("button", name="Continue this answer").click()
        for seen in (one, two):
            seen.until_text(".assistant .body", "Begun and ended")
        two.wait_for_answers(1)
        assert two.page.get_by_role("button", name="Continue this answer").count() == 0


def test_a_stale_question_shows_both_sides(
    start_server: StartServer, visit: Open, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_SECONDS", 3600.0)
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.wait_for_answers(1)
        store = Store.open(home / "chat.sqlite")  # of a terminal, not noticed yet
        [record] = store.chats()
        other = store.add(record.id, record.leaf_id, Role.USER, "from the terminal")
        store.add(record.id, other.id, Role.ASSISTANT, "Its answer")
        store.close()
        seen.is_alone = True  # Chromium logs the 409
        seen.ask("mine")
        seen.until_text(".user .body", "from the terminal")
        seen.until_text("#note", "gone on elsewhere")
        assert seen.page.input_value("#text") == "mine"
        seen.page.press("#text", "Enter")
        seen.wait_for_answers(3)
        assert seen.texts[2:] == ["from the terminal", "Its answer", "mine", "Hello"]


def test_an_answer_of_a_server_that_died_is_there_and_goes_on(
    chat: FakeChat, visit: Open, home: Path
) -> None:
    store = Store.open(home / "chat.sqlite")
    record = store.create_chat("Before")
    question = store.add(record.id, None, Role.USER, "Why?")
    answer = store.add(record.id, question.id, Role.ASSISTANT, "Begun ", state=State.WRITING)
    store.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with closing(sqlite3.connect(home / "chat.sqlite")) as file, file:
        file.execute("UPDATE messages SET writer = ? WHERE id = ?", (ended.pid, answer.id))
    chat.script = [Delta("and ended", (69,)), END]
    with serving(chat) as server, visit(server.url) as seen:
        open_first(seen)
        seen.until_text(".assistant .note", "stopped")
        seen.page.get_by_role("button", name="Continue this answer").click()
        seen.until_text(".assistant .body", "Begun and ended")


def test_a_page_finds_its_chat_again_after_a_restart(
    chat: FakeChat, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.script = SLOW
    with serving(chat) as first:
        port = first.port
        with visit(first.url) as seen:
            seen.is_alone = True
            seen.until("Ready")
            seen.ask("one")
            seen.until_text(".assistant .body", "Begun")
            first.stop()
            again = FakeChat()
            with serving(again, port=port):
                seen.until("Ready")
                seen.page.locator(".assistant[aria-busy=false]").wait_for()
                assert [text.strip() for text in seen.texts] == ["one", "Begun"]
                seen.page.locator("#unsaved").wait_for(state="hidden")
                seen.ask("two")
                seen.wait_for_answers(2)


def test_a_large_answer_is_sent_once(
    chat: FakeChat, start_server: StartServer, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks when they are finished, and of the last one what has grown, as with 2 kB a second."""
    assert 49_000 < len(LARGE) < 60_000
    monkeypatch.setattr(answer_writer, "PUBLISH_INTERVAL", 0.01)
    pieces = [Delta(LARGE[at : at + 500], (65,)) for at in range(0, len(LARGE), 500)]
    chat.script = [step for piece in pieces for step in (piece, HOLD)] + [END]
    url = start_server().url
    made = httpx.post(f"{url}/api/v1/chats", json={"title": "Large"}).json()["id"]
    follower = Follower(url, made)
    follower.wait_for("state")
    num_steps = count(1)

    async def until_it_is_shown() -> None:
        number = next(num_steps)
        await until(lambda: len(follower.of("blocks")) >= number)

    monkeypatch.setattr(chat, "wait_for_release", until_it_is_shown)
    sent: list[int] = []
    with visit(f"{url}/#{made}", is_first=True) as seen:
        seen.until("Ready")
        seen.page.on("request", lambda request: sent.append(len(request.post_data or "")))
        seen.page.wait_for_function("() => document.title.startsWith('Large')")
        seen.ask("one")
        follower.wait_for("end")
        seen.wait_for_answers(1)
        num_bytes = follower.num_bytes + sum(sent)
        assert num_bytes < MAX_WIRE, (follower.num_bytes, sum(sent))
        assert len(follower.of("blocks")) >= len(pieces)
        assert text_of(follower.blocks).count("Paragraph") == LARGE.count("Paragraph")
        assert seen.page.locator(".assistant td").count() == 200
        follower.close()


def test_a_chat_of_500_messages_opens_in_five_requests(
    start_server: StartServer, visit: Open, home: Path
) -> None:
    store = Store.open(home / "chat.sqlite")
    record, parent = store.create_chat("Long"), None
    for number in range(500):
        role = Role.ASSISTANT if number % 2 else Role.USER
        parent = store.add(record.id, parent, role, f"Number **{number}** of all.").id
    store.close()
    asked: list[Request] = []
    with visit(start_server().url) as seen:
        seen.until("Ready")
        own = seen.page.locator("#chat-list .open", has_text="Long")
        own.wait_for()
        seen.page.on("request", lambda request: asked.append(request))
        own.click()
        seen.page.wait_for_function(
            "() => document.querySelectorAll('.body strong').length === 500"
        )
        paths = [
            each.url.partition("/api/")[2]
            for each in asked
            if "/chats" in each.url or "/render" in each.url
        ]
        # Beside these the list, once: calls for it are gathered.
        opened = [path for path in paths if path != "v1/chats"]
        assert len(opened) <= 4, paths
        asked.clear()
        seen.page.click("#new")
        own.click()
        seen.page.wait_for_function(
            "() => document.querySelectorAll('.body strong').length === 500"
        )
        assert not [each for each in asked if "/render" in each.url], "their blocks are still here"


def test_drafts_stay_in_their_chats_and_outlive_an_edit(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        page = seen.page
        seen.until("Ready")
        page.fill("#text", "of a new chat")
        page.fill("#text", "")
        seen.ask("one")
        seen.wait_for_answers(1)
        page.fill("#text", "a draft of one")
        page.get_by_role("button", name="Edit").click()
        assert page.input_value("#text") == "one"
        page.click("#edit-cancel")
        assert page.input_value("#text") == "a draft of one"
        page.get_by_role("button", name="Edit").click()
        page.fill("#text", "eins")
        page.press("#text", "Enter")
        seen.until_text(".user .body", "eins")
        assert page.input_value("#text") == "a draft of one"
        page.click("#new")
        assert page.input_value("#text") == ""
        page.fill("#text", "of a new chat")
        page.locator("#chat-list .open", has_text="one").click()
        page.wait_for_function("() => document.getElementById('text').value === 'a draft of one'")
        page.click("#new")
        assert page.input_value("#text") == "of a new chat"
        assert seen.errors == []


def test_each_chat_and_message_has_an_address_and_a_title(
    start_server: StartServer, visit: Open, home: Path
) -> None:
    store = Store.open(home / "chat.sqlite")
    first, second = store.create_chat("About seals"), store.create_chat("About walruses")
    message = store.add(first.id, None, Role.USER, "Seals?")
    store.add(second.id, None, Role.USER, "Walruses?")
    store.close()
    url = start_server().url
    with visit(url) as seen:
        page = seen.page
        seen.until("Ready")
        assert page.title() == "mlxserve"
        page.locator("#chat-list .open", has_text="seals").click()
        page.wait_for_function("() => document.title.startsWith('About seals')")
        page.locator("#chat-list .open", has_text="walruses").click()
        page.wait_for_function("() => document.title.startsWith('About walruses')")
        assert page.url.endswith(f"#{second.id}")
        page.go_back()
        seen.until_text(".user .body", "Seals?")
        page.go_back()
        page.locator("#welcome").wait_for()
        page.go_forward()
        seen.until_text(".user .body", "Seals?")
        assert page.title().startswith("About seals")
    with visit(f"{url}/#{first.id}/{message.id}") as seen:
        seen.page.locator(".message.hit", has_text="Seals?").wait_for()


def test_escape_in_the_search_does_not_stop_an_answer(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    chat.script = SLOW
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("one")
        seen.until_text(".assistant .body", "Begun")
        methods: list[str] = []
        seen.page.on("request", lambda request: methods.append(request.method))
        seen.page.press("#search", "Escape")
        chat.release()
        seen.until_text(".assistant .body", "Begun ended")
        assert "DELETE" not in methods


def test_answering_an_earlier_question_again_says_what_it_hides(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        for number, text in enumerate(("one", "two"), 1):
            seen.ask(text)
            seen.wait_for_answers(number)
        seen.page.get_by_role("button", name="Regenerate").first.click()
        seen.until_text("#note", "2 later messages stay")
        wait_until(lambda: len(chat.rendered) == 3)
        assert json.dumps(chat.rendered[-1].messages).count("two") == 0
