"""Visits of the page in headless Chromium.

Needs a Chromium of the system (`.ci/run` installs one); without one these tests say so and are
skipped. Playwright drives it and downloads nothing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.api.page.visits import Open, Visit

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page was not run in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own for the chats of each test."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))


@pytest.fixture
def visit(browser: Browser) -> Open:
    """Opens the page of a server in a window of a given size and colour scheme."""

    @contextlib.contextmanager
    def opened(
        url: str,
        scheme: str = "light",
        *,
        bypass_csp: bool = False,
        key: str | None = None,
        is_first: bool = False,
        **viewport: int,
    ) -> Iterator[Visit]:
        size = {"width": 1280, "height": 800, **viewport}
        context = browser.new_context(
            color_scheme=scheme,  # type: ignore[arg-type]
            viewport=size,  # type: ignore[arg-type]
            bypass_csp=bypass_csp,
        )
        if key is not None:  # as if it had been typed
            context.add_init_script(f"sessionStorage.setItem('mlxserve-key', {json.dumps(key)})")
        if not is_first:  # as one who has opened the engine before
            context.add_init_script("localStorage['mlxserve-engine'] ??= 'open'")
        try:
            yield Visit(context.new_page(), url)
        finally:
            context.close()

    return opened
