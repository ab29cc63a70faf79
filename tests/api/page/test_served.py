"""The models of the server beside its engine, in headless Chromium: loaded, pinned and unloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer
from tests.api.several_models import serving_several

pytestmark = pytest.mark.slow


def test_models_are_loaded_pinned_and_unloaded_and_refusals_are_said(visit: Open) -> None:
    scripts = {"first": None, "second": [HOLD], "broken": None}
    with serving_several(scripts) as (server, models), visit(server.url) as seen:
        page = seen.page
        row = {name: page.locator(".served", has_text=name) for name in scripts}
        seen.until_text(".served", "second")
        assert "not loaded · 0.00 GiB of weights" in row["second"].inner_text()
        row["second"].get_by_text("Load", exact=True).press("Enter")
        pin = row["second"].get_by_text("Pin", exact=True)
        pin.wait_for()
        pin.click()
        row["second"].locator("[aria-pressed=true]").wait_for()
        pin.click()
        row["second"].locator("[aria-pressed=false]").wait_for()
        seen.errors.clear()
        seen.is_alone = True  # Chromium logs the refusals
        row["broken"].get_by_text("Load", exact=True).click()
        seen.until_text("#served-note", "broken needs 9.00 GiB")
        page.select_option("#models", "second")
        seen.until("Ready")
        seen.ask("Well?")
        assert models.chats["second"].on_hold.wait(60)
        unload = row["second"].get_by_text("Unload", exact=True)
        unload.click()
        seen.until_text("#served-note", "second is answering. Unload again ends its answers.")
        unload.click()
        row["second"].get_by_text("Load", exact=True).wait_for()
        seen.wait_for_answers(1)
        assert page.locator(".served", has_text="first").get_by_text("Pin").is_visible()
        assert seen.errors == []


def test_who_may_not_change_them_does_not_see_them(
    chat: FakeChat, start_server: StartServer, visit: Open, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = file.create("colleague", Scope.USER)
    access = AccessPolicy(keys_file=file.path)
    with visit(start_server(access=access).url, key=key) as seen:
        seen.is_alone = True  # Chromium logs the 403
        seen.until("Ready")
        seen.until_text("#refused", "admin keys only")
        assert seen.page.locator("#served").is_hidden()
