"""The list of chats: it shows what others do, and has groups of pinned chats, of folders and of days."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from mlxserve.history.messages import ChatRecord
from mlxserve.history.store import Store
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer

if TYPE_CHECKING:
    from playwright.sync_api import Request

pytestmark = pytest.mark.slow

CHATS = "/api/v1/chats"
# Each group's name and the titles in it, in their order.
GROUPS = """() => [...document.querySelectorAll("#chat-list .group")].map((one) => [
  one.querySelector("summary").textContent,
  ...[...one.querySelectorAll(".title")].map((title) => title.textContent)])"""
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def until_titles(seen: Visit, *titles: str) -> None:
    seen.page.wait_for_function(
        "wanted => JSON.stringify([...document.querySelectorAll('#chat-list .title')]"
        ".map((one) => one.textContent)) === JSON.stringify(wanted)",
        arg=list(titles),
    )


def until_groups(seen: Visit, *groups: list[str]) -> None:
    seen.page.wait_for_function(
        f"wanted => JSON.stringify(({GROUPS})()) === JSON.stringify(wanted)", arg=list(groups)
    )


def test_the_list_shows_what_other_pages_and_programs_do(
    start_server: StartServer, visit: Open
) -> None:
    url = start_server().url
    with visit(url) as reads, visit(url) as acts, httpx.Client(base_url=url) as program:
        for seen in (reads, acts):
            seen.until("Ready")
            seen.until_text("#chat-list", "No chats yet.")
        acts.ask("About seals")
        until_titles(reads, "About seals")  # with no chat open
        reads.page.locator("#chat-list .open").click()
        reads.wait_for_answers(1)
        acts.page.click("#new")
        acts.ask("About walruses")
        until_titles(reads, "About walruses", "About seals")  # with another one open
        acts.page.once("dialog", lambda dialog: dialog.accept("About foxes"))
        acts.choose("Rename", "About walruses")
        until_titles(reads, "About foxes", "About seals")
        # The keyboard stays at the chat, and the list where it was scrolled to.
        for number in range(20):
            program.post(CHATS, json={"title": f"Chat {number}"})
        reads.page.locator("#chat-list .title", has_text="Chat 19").wait_for()
        menu = reads.page.get_by_role("button", name="Menu of About seals")
        menu.focus()
        top = menu.evaluate("one => one.getBoundingClientRect().top")
        asked: list[Request] = []
        reads.page.on("request", lambda request: asked.append(request))
        for number in range(20, 30):
            program.post(CHATS, json={"title": f"Chat {number}"})
        reads.page.locator("#chat-list .title", has_text="Chat 29").wait_for()
        assert reads.page.evaluate("document.activeElement.ariaLabel") == "Menu of About seals"
        assert abs(menu.evaluate("one => one.getBoundingClientRect().top") - top) < 2
        lists = [each for each in asked if each.url.endswith("/api/v1/chats")]
        assert len(lists) <= 10, "no change is asked about twice"
        [foxes] = [
            card["id"]
            for card in program.get(CHATS).json()["data"]
            if card["title"] == "About foxes"
        ]
        program.delete(f"{CHATS}/{foxes}")
        reads.page.locator("#chat-list .title", has_text="About foxes").wait_for(state="detached")
        assert reads.errors == acts.errors == []


def test_chats_are_pinned_and_put_into_folders(
    start_server: StartServer, visit: Open, home: Path
) -> None:
    now = time.time()
    with closing(Store.open(home / "chat.sqlite")) as store:
        for title, at in (
            ("old", now - 40 * DAY),
            ("recent", now - 3 * DAY),
            ("new", now + 3600),  # today, also at midnight
            ("newest", now + 3601),
        ):
            store.insert(ChatRecord(id=0, title=title, created_at=at, updated_at=at), [])
    with visit(start_server().url) as seen:
        page = seen.page
        until_groups(
            seen, ["Today", "newest", "new"], ["Last 7 days", "recent"], ["Earlier", "old"]
        )
        seen.choose("Pin", "old")
        until_groups(seen, ["Pinned", "old"], ["Today", "newest", "new"], ["Last 7 days", "recent"])
        page.once("dialog", lambda dialog: dialog.accept("Work "))
        seen.choose("New folder", "recent")
        until_groups(seen, ["Pinned", "old"], ["Work", "recent"], ["Today", "newest", "new"])
        # By the keyboard, which stays at the chat.
        menu = page.get_by_role("button", name="Menu of newest")
        menu.focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.activeElement.textContent === 'Pin'")
        page.keyboard.press("End")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.textContent") == "In Work"
        page.keyboard.press("Enter")
        until_groups(seen, ["Pinned", "old"], ["Work", "newest", "recent"], ["Today", "new"])
        assert page.evaluate("document.activeElement.ariaLabel") == "Menu of newest"
        page.keyboard.press("Enter")
        assert (
            page.get_by_role("menuitemradio", name="In Work").get_attribute("aria-checked")
            == "true"
        )
        page.keyboard.press("Escape")
        assert page.locator("#chat-menu").is_hidden()
        assert page.evaluate("document.activeElement.ariaLabel") == "Menu of newest"
        # A bad name is a sentence, and changes nothing.
        page.on("dialog", refuse := lambda dialog: dialog.accept("x" * 61))
        with page.expect_event("dialog", lambda dialog: dialog.type == "alert") as told:
            seen.choose("New folder", "recent")
        assert "60 characters" in told.value.message
        page.remove_listener("dialog", refuse)
        # A group that was closed stays closed.
        page.locator("#chat-list summary", has_text="Work").click()
        page.locator("#chat-list .title", has_text="recent").wait_for(state="hidden")
        seen.reload()
        until_groups(seen, ["Pinned", "old"], ["Work", "newest", "recent"], ["Today", "new"])
        assert page.locator("#chat-list .title", has_text="recent").is_hidden()
        seen.choose("Unpin", "old")
        until_groups(seen, ["Work", "newest", "recent"], ["Today", "new"], ["Earlier", "old"])
        assert len(seen.errors) == 1, "Chromium logs the 400 of the bad name"
    with closing(Store.open(home / "chat.sqlite")) as store:
        assert {chat.title: chat.folder for chat in store.chats()} == {
            "new": "",
            "newest": "Work",
            "old": "",
            "recent": "Work",
        }
