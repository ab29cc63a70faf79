"""The engine panel in a terminal, with a scripted server."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from textual.widgets import Static

from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Hosted, Open, hosted
from tui.engine import panel
from tui.engine.page_watch import PageWatch
from tui.engine.panel import STRIP, EnginePanel, PanelInput
from tui.engine.placement import EngineScreen
from tui.talk.client import ChatClient
from tui.talk.engine_client import EngineClient
from tui.talk.engine_state import EngineStats

PAGES = "p2a3s1c4f6"


def opening(size: tuple[int, int]) -> tuple[str, ...]:
    """The keys that open the whole panel: where there is no room beside the chat, a strip is first."""
    return ("f4",) if size[0] >= 110 else ("f4", "f4")


def shows_engine(server: FakeServer, *more: object) -> None:
    server.engine["/api/v1/kv/stats"] = scripts.engine_stats(running=1, waiting=2)
    server.engine["/api/v1/requests"] = {"data": []}
    first = scripts.page_event("snapshot", seq=0, page_size=32, num_pages=16, pages=PAGES)
    server.map = [first, *more, scripts.Gate()]  # type: ignore[list-item]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_panel_shows_pages_statistics_and_reuse(
    terminal: Open, server: FakeServer, size: tuple[int, int]
) -> None:
    shows_engine(server)
    server.script(
        scripts.say("Yes."),
        scripts.usage(19020, 3, 18432, num_tokens=18432, differs_at=18440, reason="new_text"),
    )

    async with terminal(size=size) as t:
        await t.talk("why?")
        await t.press(*opening(size))
        await t.until_shown("▲▲■■■◆□□□□······")
        for words in (
            "reused 18,432 of 19,020 tokens",
            "differs at token 18,440",
            "running 1 · waiting 2",
            "decode 42.2 tok/s",
            "preemptions 3",
            "memory 3.0 GiB",
            "◆ shared 1",
            "▲ pinned 2",
            "16 pages of 32 tokens",
        ):
            await t.until_shown(words)
        assert isinstance(t.app.screen, EngineScreen) == (size[0] < 110)
        assert len(t.screen.split("\n")) == size[1]
        await t.press("escape" if size[0] < 110 else "f4")
        await t.until(lambda: "this chat" not in t.screen)


async def test_pages_of_windows_are_shown_below_the_others(
    terminal: Open, server: FakeServer
) -> None:
    shows_engine(server)
    told = {"page_size": 32, "num_pages": 16, "pages": PAGES, "window_pages": "a3c4f5"}
    change = scripts.page_event("delta", seq=1, pages=[], window_pages=[[0, "c1"]])
    gate = scripts.Gate()
    server.map = [scripts.page_event("snapshot", seq=0, **told), gate, change, scripts.Gate()]

    async with terminal(size=(120, 44)) as t:
        await t.press("f4")
        for words in ("▲▲■■■◆□□□□······", "Pages of windows", "■■■□□□□·····"):
            await t.until_shown(words)
        await t.until_shown("12 pages · cached 4 · active 3")
        gate.open()
        await t.until_shown("□■■□□□□·····")


async def test_the_pages_of_the_open_chat_are_marked_also_after_its_answer(
    terminal: Open, server: FakeServer
) -> None:
    asked, ended = scripts.Gate(), scripts.Gate()
    own = {"id": "request-1", "from": 0, "pages": [[2, 3]]}
    shows_engine(
        server,
        asked,
        scripts.page_event("delta", seq=1, pages=[], requests=[own]),
        ended,
        scripts.page_event("delta", seq=2, pages=[[2, "c3"]], gone=["request-1"]),
    )
    writing = scripts.Gate()
    server.script(scripts.say("Yes."), writing)

    async with terminal(size=(120, 40)) as t:
        await t.press("f4")
        await t.until_shown("this chat 0")
        await t.ask("why?")
        await t.until_shown("Yes.")
        asked.open()
        await t.until_shown("this chat 3")
        ended.open()
        writing.open()
        await t.until_shown("▲▲□□□◆□□□□······")
        assert "this chat 3" in t.screen
        await t.press("ctrl+n")
        await t.until_shown("this chat 0")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_panel_opened_after_an_answer_marks_its_pages(
    terminal: Open, server: FakeServer, size: tuple[int, int]
) -> None:
    asked = scripts.Gate()
    own = {"id": "request-1", "from": 0, "pages": [[2, 3]]}
    shows_engine(
        server,
        asked,
        scripts.page_event("delta", seq=1, pages=[], requests=[own]),
        scripts.page_event("delta", seq=2, pages=[[2, "c3"]], gone=["request-1"]),
    )

    async with terminal(size=size) as t:
        await t.talk("why?")
        asked.open()
        for _ in range(2):
            await t.press(*opening(size))
            await t.until_shown("this chat 3")
            await t.press("escape" if size[0] < 110 else "f4")
            await t.until(lambda: not t.app.screen.query(EnginePanel))


async def test_the_panel_moves_to_where_there_is_room(terminal: Open, server: FakeServer) -> None:
    shows_engine(server)

    async with terminal(size=(120, 40)) as t:
        await t.press("f4")
        await t.until_shown("▲▲■■■◆")
        await t.pilot.resize_terminal(80, 24)
        await t.until(lambda: bool(t.app.screen.query(f".{STRIP}")))
        await t.until_shown("▲▲■■■◆")
        await t.pilot.resize_terminal(120, 40)
        await t.until(lambda: not t.app.screen.query(f".{STRIP}"))
        await t.until_shown("▲▲■■■◆")
        await t.pilot.resize_terminal(80, 18)
        await t.until(lambda: isinstance(t.app.screen, EngineScreen))
        await t.until_shown("▲▲■■■◆")
        await t.pilot.resize_terminal(120, 40)
        await t.until(lambda: not isinstance(t.app.screen, EngineScreen))
        await t.until_shown("▲▲■■■◆")


async def test_in_a_narrow_window_a_strip_leaves_the_chat_in_sight(
    terminal: Open, server: FakeServer
) -> None:
    shows_engine(server)

    async with terminal(size=(80, 24)) as t:
        await t.press("f4")
        await t.until_shown("▲▲■■■◆□□□□······")
        await t.until_shown("running 1 · waiting 2")
        await t.talk("why?")
        assert "▲▲■■■◆" in t.screen
        await t.press("f4")
        await t.until(lambda: isinstance(t.app.screen, EngineScreen))
        await t.until_shown("Last answer")
        await t.press("f4")
        await t.until(lambda: not t.app.screen.query(EnginePanel))
        await t.until(lambda: t.composer.region.bottom == 23)  # just above the status line


@asynccontextmanager
async def shown_alone(server: FakeServer) -> AsyncGenerator[Hosted, None]:
    """The panel of the fake server, without a chat."""
    shown = PanelInput(None, None, None)
    watch = PageWatch(lambda: shown.engine)
    alone = EnginePanel(lambda: shown, watch)
    async with hosted(alone, size=(50, 40)) as t, ChatClient(server.url) as client:
        shown = PanelInput(client.engine, None, None)
        watching = asyncio.create_task(watch.run())
        yield t
        watching.cancel()
        await alone.remove()


async def test_a_server_without_an_engine_is_reported(server: FakeServer) -> None:
    async with shown_alone(server) as t:
        await t.until_shown("does not report its")
        assert "shared" not in t.screen


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_waiting_is_shown_as_progress(
    terminal: Open, server: FakeServer, size: tuple[int, int]
) -> None:
    def is_now(state: str, **more: object) -> None:
        card = scripts.request_card("request-1", state, **more)
        server.engine["/api/v1/requests"] = {"data": [card]}

    gate = scripts.Gate()
    server.script(gate, scripts.say("Yes."))
    is_now("queued", position=2)

    async with terminal(size=size) as t:
        await t.ask("why?")
        await t.until_shown("in the queue, position 2")
        is_now("loading")
        await t.until(lambda: "from disk" in t.status)
        is_now("prefilling", num_computed=12_400, num_to_compute=20_000)
        await t.until_shown("Reading the prompt, 12,400 of 20,000 tokens")
        await t.until(lambda: "62%" in t.status)
        gate.open()
        await t.until_shown("Yes.")
        await t.until_ready()


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[EngineStats]:
    """What the panel was told, by polls that follow each other quickly."""
    told: list[EngineStats] = []
    stats = EngineClient.stats

    async def noted(engine: EngineClient) -> EngineStats:
        told.append(await stats(engine))
        return told[-1]

    monkeypatch.setattr(EngineClient, "stats", noted)
    monkeypatch.setattr(panel, "POLL_SECONDS", 0.01)
    return told


@pytest.mark.long
async def test_an_engine_that_does_nothing_is_asked_again_when_a_page_changes(
    server: FakeServer, polls: list[EngineStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "QUIET_POLL_SECONDS", 3600)
    begins = scripts.Gate()
    delta = scripts.page_event("delta", seq=1, pages=[[10, "a1"]])
    shows_engine(server, begins, delta)
    server.engine["/api/v1/kv/stats"] = scripts.engine_stats()

    async with shown_alone(server) as t:
        await t.until_shown("▲▲■■■◆□□□□······")
        await t.until_shown("running 0")
        num_polls = 0
        while num_polls < len(polls):
            num_polls = len(polls)
            assert num_polls < 1000, "it is polled all the time"
            for _ in range(20):
                await t.pilot.pause()
        server.engine["/api/v1/kv/stats"] = scripts.engine_stats(running=1)
        begins.open()
        await t.until_shown("running 1")
        num_polls = len(polls)
        await t.until(lambda: len(polls) > num_polls + 5)


@pytest.mark.usefixtures("polls")
async def test_a_sparkline_goes_on_at_the_same_speed_while_the_engine_is_asked_less_often(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "QUIET_POLL_SECONDS", 2)  # 200 polls, of which 60 are shown
    shows_engine(server)

    def now(t: Hosted) -> str:
        return "".join(str(one.content) for one in t.app.screen.query("#now").results(Static))

    async with shown_alone(server) as t:
        await t.until(lambda: "█" in now(t))
        nothing = {"prefill": 0.0, "generation": 0.0}
        stats = scripts.engine_stats() | {"tokens_per_second": nothing}
        server.engine["/api/v1/kv/stats"] = stats
        await t.until(lambda: "running 0" in now(t))
        await t.until(lambda: "█" not in now(t))
