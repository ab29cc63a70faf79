"""The page of the server's own user once there are keys, beside that of a colleague."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.history.store import Store
from tests.api.access.kept_secret import KeptSecret
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer

pytestmark = pytest.mark.slow


def test_sharing_leaves_the_owner_their_page_and_a_colleague_another(
    chat: FakeChat,
    start_server: StartServer,
    visit: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    store = Store.open(tmp_path / "chat.sqlite")
    store.create_chat("From the terminal")
    store.close()
    file = KeyFile(tmp_path / "keys.json", KeptSecret())
    colleague = file.create("colleague", Scope.USER, requests_per_minute=1)
    url = start_server(access=AccessPolicy(keys_file=file.path)).url
    with visit(url) as mine:
        mine.until("Ready")
        assert mine.page.locator("#key").is_hidden()
        mine.until_text("#chat-list .open", "From the terminal")
        mine.until_text("#pages", "in use")
        for count in (1, 2):
            mine.ask("About the owner")
            mine.wait_for_answers(count)
        assert mine.texts == ["About the owner", "Hello"] * 2
        mine.until_text("#chat-list .open", "About the owner")
        assert mine.errors == []
        with visit(url, key=colleague) as theirs:
            theirs.is_alone = True  # Chromium logs the 403 of the engine
            theirs.until("Ready")
            theirs.until_text("#chat-list", "No chats yet.")
            theirs.ask("About a colleague")
            theirs.wait_for_answers(1)
            theirs.until_text("#chat-list .open", "About a colleague")
            assert theirs.page.locator("#chat-list .open").count() == 1
            theirs.until_text("#refused", "admin keys only")
        mine.reload()
        mine.until_text("#chat-list .open", "From the terminal")
        assert mine.page.locator("#chat-list .open").count() == 2
