"""A visit of the page in headless Chromium."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Page

PATIENCE = 60_000  # milliseconds
_NUM_ANSWERED = "document.querySelectorAll('.assistant[aria-busy=false]').length"


class Visit:
    """One page, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.is_alone = False  # the server is gone on purpose: requests may fail
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.goto(url)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and not self.is_alone:
            self.errors.append(text)

    def ask(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def wait_for_answers(self, count: int) -> None:
        self.page.wait_for_function(f"count => {_NUM_ANSWERED} >= count", arg=count)

    def reload(self) -> None:
        """Reload once no question is on its way, or the browser would ask whether to lose it."""
        self.page.wait_for_function("() => document.getElementById('composer').ariaBusy !== 'true'")
        self.page.reload()

    def choose(self, item: str, chat: str = "") -> None:
        """Choose an item of a chat's menu."""
        self.page.get_by_role("button", name=f"Menu of {chat}").first.click()
        self.page.locator("#chat-menu .button", has_text=item).first.click()

    def until(self, state: str) -> None:
        self.page.wait_for_function(
            "words => document.getElementById('state').textContent.includes(words)", arg=state
        )

    def until_text(self, selector: str, words: str) -> None:
        self.page.locator(selector, has_text=words).first.wait_for()

    @property
    def texts(self) -> list[str]:
        """Of the messages, without their notes and buttons."""
        return self.page.locator(".message .body").all_inner_texts()


Open = Callable[..., contextlib.AbstractContextManager[Visit]]
