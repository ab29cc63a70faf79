"""The terminal on a server that keeps its chats: it shows what others ask, and asks through the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any, TypeAlias

import httpx
import pytest
from textual.widgets import OptionList

from mlxserve.api.chats import file_watch
from mlxserve.core.errors import PromptTooLong
from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.chats.following import Follower, text_of
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import Running, serving
from tests.mcp.kept_settings import scripted, write_servers
from tests.tui.chats_on_disk import branch, write_chat
from tests.tui.terminals import Open, Terminal
from tests.waiting import wait_until
from tui.home import Home
from tui.talk.chats_client import ChatsClient
from tui.talk.connection import ConnectOptions, Connector
from tui.widgets.call_dialog import CallDialog

END = Delta("", (), (), FinishReason.STOP, Usage(5, 9, 0))
SLOW = [Delta("Begun ", (66,)), HOLD, Delta("ended", (69,)), END]
CHATS = "/api/v1/chats"
PATIENCE = 60.0  # seconds

OpenHere: TypeAlias = Callable[..., AbstractAsyncContextManager[Terminal]]


@pytest.fixture
def chat() -> FakeChat:
    return FakeChat()


@pytest.fixture
def running(chat: FakeChat, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server that keeps its chats in the terminal's file."""
    monkeypatch.setenv("MLXSERVE_HOME", str(home.folder))
    with ExitStack() as stack:
        yield stack.enter_context(serving(chat))
        chat.release()


@pytest.fixture
def here(terminal: Open, home: Home, running: Running) -> OpenHere:
    """Opens the terminal on that server."""

    @asynccontextmanager
    async def opened(**how: Any) -> AsyncGenerator[Terminal, None]:
        connector = Connector(ConnectOptions(url=running.url), home)
        async with terminal(connector, **how) as t:
            yield t

    return opened


def other(running: Running) -> httpx.AsyncClient:
    """Another client of the server, as the page is one."""
    return httpx.AsyncClient(base_url=running.url, timeout=60)


def is_refused(home: Home, answer_id: int) -> bool:
    with closing(Store.open(home.chats)) as store:
        return store.message(answer_id).state is State.FAILED


@asynccontextmanager
async def answered(here: OpenHere) -> AsyncGenerator[Terminal, None]:
    """A terminal whose first question has its answer."""
    async with here() as t:
        await t.ask("one")
        await t.until_answered("Hello")
        yield t


@asynccontextmanager
async def answering(here: OpenHere, chat: FakeChat) -> AsyncGenerator[Terminal, None]:
    """A terminal whose first answer has begun, and waits for `chat.release`."""
    chat.script = SLOW
    async with here() as t:
        await t.ask("one")
        await t.until_shown("Begun")
        yield t


async def heard(t: Terminal, page: Follower, name: str, number: int = 1) -> Any:
    """The last of so many events, for which the terminal goes on meanwhile."""
    await t.until(lambda: len(page.of(name)) == number)
    return page.of(name)[-1]


async def test_what_two_browsers_and_a_terminal_ask_all_three_show(
    here: OpenHere, chat: FakeChat, running: Running, home: Home
) -> None:
    write_chat(home, "One", "one", "Yes.")
    one, two = (Follower(running.url, 1) for _ in range(2))
    chat.script = SLOW
    async with here(continues=True) as t:
        await t.until(lambda: t.messages == ["one", "Yes."])
        for each in (one, two):
            await heard(t, each, "state")
        async with other(running) as browser:
            body = {"text": "two", "leaf_id": 2, "parent_id": 2}
            asked = await browser.post(f"{CHATS}/1/answers", json=body)
            assert asked.status_code == 200, asked.text
        await t.until_shown("Begun")
        assert "Esc stops" in t.status
        one.close()  # the browser that asked
        chat.release()
        await t.until_answered("Begun ended")
        await heard(t, two, "end")
        assert text_of(two.blocks) == "Begun ended"
        chat.script = None
        await t.ask("three")
        await t.until_answered("Hello")
        await heard(t, two, "end", 2)
        assert text_of(two.blocks) == "Hello"
        two.close()
    assert [m["content"] for m in chat.rendered[-1].messages] == [
        *("one", "Yes.", "two", "Begun ended", "three"),
    ]
    assert [m.text for m in branch(home)][-4:] == ["two", "Begun ended", "three", "Hello"]


async def test_escape_stops_an_answer_for_all(
    here: OpenHere, chat: FakeChat, running: Running, home: Home
) -> None:
    async with answering(here, chat) as t:
        page = Follower(running.url, 1)
        await heard(t, page, "state")
        await t.press("escape")
        assert (await heard(t, page, "end"))["state"] == "stopped"
        await t.until(lambda: "Stopped" in t.status)
        page.close()
        chat.script = [Delta("and ended", (69,)), END]
        await t.ask("/continue")
        await t.until_answered("Begun and ended")
    assert [(m.text, m.state) for m in branch(home)][1:] == [("Begun and ended", State.DONE)]


async def test_closing_the_terminal_leaves_the_answer_to_the_server(
    here: OpenHere, chat: FakeChat, running: Running, home: Home
) -> None:
    async with answering(here, chat) as t:
        page = Follower(running.url, 1)
        await heard(t, page, "state")
        await t.app.action_quit()
        assert t.app.answering.has_left_answer
    chat.release()
    assert page.wait_for("end")["state"] == "done"
    page.close()
    assert branch(home)[-1].text == "Begun ended"


async def test_an_answer_goes_on_while_another_chat_is_open(
    here: OpenHere, chat: FakeChat, home: Home
) -> None:
    async with answering(here, chat) as t:
        await t.ask("/new")
        await t.until(lambda: t.messages == [])
        chat.script = None
        await t.ask("two")
        await t.until_answered("Hello")
        await t.ask("/chats")
        await t.until_shown("one")
        await t.press("down", "enter")
        await t.until_shown("Begun")
        assert "Esc stops" in t.status
        chat.release()
        await t.until_answered("Begun ended")
    with closing(Store.open(home.chats)) as store:
        assert [m.state for m in store.messages(1)] == [State.DONE] * 2


async def test_a_stale_question_shows_both_sides(
    here: OpenHere, chat: FakeChat, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_SECONDS", 3600.0)
    async with answered(here) as t:
        with closing(Store.open(home.chats)) as store:  # which the server has not noticed yet
            more = store.add(1, 2, Role.USER, "from elsewhere")
            store.add(1, more.id, Role.ASSISTANT, "Its answer")
        await t.ask("mine")
        await t.until_shown("has gone on elsewhere")
        assert t.messages == ["one", "Hello", "from elsewhere", "Its answer"]
        assert t.composer.text == "mine"
        await t.press("enter")
        await t.until(lambda: len(t.messages) == 6)
        await t.until_answered("Hello")
    assert [m.text for m in branch(home)][-2:] == ["mine", "Hello"]
    assert len(chat.rendered) == 2


@pytest.mark.slow
async def test_the_terminal_finds_its_chat_again_after_a_restart(
    terminal: Open, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(home.folder))
    first, second = FakeChat(script=SLOW), FakeChat()
    with serving(first) as server:
        connector = Connector(ConnectOptions(url=server.url), home)
        async with terminal(connector) as t:
            await t.ask("one")
            await t.until_shown("Begun")
            server.stop()
            with serving(second, port=server.port):
                await t.until(lambda: "Esc stops" not in t.status)
                assert [text.strip() for text in t.messages] == ["one", "Begun"]
                await t.ask("two")
                await t.until_answered("Hello")
    assert [m["content"].strip() for m in second.rendered[0].messages] == ["one", "Begun", "two"]


async def test_a_title_and_a_deletion_elsewhere_are_shown(here: OpenHere, running: Running) -> None:
    async with answered(here) as t, other(running) as browser:
        await browser.patch(f"{CHATS}/1", json={"title": "Renamed"})
        await t.until_shown("Renamed")
        await browser.delete(f"{CHATS}/1")
        await t.until(lambda: t.messages == [])
        await t.until_shown("deleted elsewhere")


async def test_pages_hear_what_the_terminal_renames(here: OpenHere, running: Running) -> None:
    async with answered(here) as t:
        page = Follower(running.url, 1)
        await heard(t, page, "state")
        await t.ask("/rename Seals")
        await t.until(lambda: [each["title"] for each in page.of("chat")] == ["Seals"])
        page.close()


@pytest.mark.parametrize(
    "is_late", [False, True], ids=["as it comes", "refused before it is shown"]
)
async def test_a_chat_that_is_full_goes_on_shorter(
    here: OpenHere, chat: FakeChat, home: Home, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    begin = ChatsClient.begin

    async def begin_late(client: ChatsClient, chat_id: int, ask: Mapping[str, Any]) -> int:
        answer_id = await begin(client, chat_id, ask)
        if is_late and chat.submit_error is not None:
            await asyncio.to_thread(wait_until, partial(is_refused, home, answer_id), PATIENCE)
        return answer_id

    monkeypatch.setattr(ChatsClient, "begin", begin_late)
    async with here() as t:
        for number, text in enumerate(("one", "two"), 1):
            await t.ask(text)
            await t.until(lambda num=2 * number: len(t.messages) == num)
            await t.until_answered("Hello")
        chat.submit_error = PromptTooLong("It does not fit.", num_tokens=9, max_model_len=8)
        await t.ask("three")
        await t.until(lambda: "full" in t.status)
        chat.submit_error = None
        await t.press("enter")
        await t.until(lambda: "Ready" in t.status and t.messages[-2:] == ["three", "Hello"])
    assert [m.text for m in branch(home)][-2:] == ["three", "Hello"]


@pytest.mark.slow
async def test_any_follower_decides_about_a_call(
    here: OpenHere, chat: FakeChat, running: Running, home: Home
) -> None:
    file = home.folder.parent / "config" / "mlxserve" / "mcp.json"
    write_servers(file, {"s": scripted()})
    call = ToolCallDelta(0, id="call_1", name="s__add", arguments='{"a": 20, "b": 22}')
    calls = [Delta("", (67,), (), FinishReason.STOP, Usage(5, 2, 0), tool_calls=(call,))]
    async with here() as t, other(running) as browser:
        chat.script = calls
        await t.ask("one")
        await t.until(lambda: isinstance(t.app.screen, CallDialog))
        chat.script = None
        page = Follower(running.url, 1)
        question = (await heard(t, page, "state"))["answer"]["question"]
        assert (question["server"], question["tool"]) == ("s", "add")
        t.app.screen.query_one(OptionList).highlighted = 0
        await t.press("enter")
        await heard(t, page, "decided")
        await t.until_answered("Hello")
        assert branch(home)[-1].rounds[0].calls[0].result == "42"
        chat.script = calls
        await t.ask("two")
        await t.until(lambda: isinstance(t.app.screen, CallDialog))
        chat.script = None
        body = {"call_id": (await heard(t, page, "question"))["call_id"], "decision": "not now"}
        reply = await browser.post(f"{CHATS}/1/answers/4/decision", json=body)
        assert reply.status_code == 200, reply.text
        await t.until(lambda: not isinstance(t.app.screen, CallDialog))
        await t.until_answered("Hello")
        page.close()


async def test_a_server_with_other_chats_is_not_followed(
    terminal: Open, home: Home, chat: FakeChat, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "elsewhere"))
    write_chat(Home(tmp_path / "elsewhere"), "Another")  # its first chat, as here
    with serving(chat) as server:
        async with terminal(Connector(ConnectOptions(url=server.url), home)) as t:
            await t.ask("one")
            await t.until_answered("Hello")
    assert branch(Home(tmp_path / "elsewhere")) == []
    assert [m.text for m in branch(home)] == ["one", "Hello"]
