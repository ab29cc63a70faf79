"""All that the page can do, one after the other, in windows of four sizes, in both colour schemes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.page.test_chat import ANSWER, SLOW, sent, view
from tests.api.page.visits import Open, Visit
from tests.api.server.process import served
from tests.api.serving import StartServer

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "home"


def show(seen: Visit, side: str, *, is_shown: bool = True) -> None:
    """Open or close a side, which covers the chat in a narrow window."""
    if (f"with-{side}" in seen.page.evaluate("document.body.className")) != is_shown:
        seen.page.click(f"#{side}-toggle")


def answered(seen: Visit, question: str) -> None:
    before = len(seen.texts)
    seen.ask(question)
    seen.page.wait_for_function(
        "count => document.querySelectorAll('.message').length >= count", arg=before + 2
    )
    seen.page.wait_for_selector(".message:last-of-type[aria-busy=false]")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (320, "dark"),
        pytest.param(390, "light", marks=pytest.mark.long),
        pytest.param(1280, "dark", marks=pytest.mark.long),
        pytest.param(1920, "light", marks=pytest.mark.long),
    ],
)
def test_every_ability_works(
    chat: FakeChat, start_server: StartServer, visit: Open, home: Path, width: int, scheme: str
) -> None:
    chat.views = [view(f"request-{number}", number) for number in range(3)]
    chat.pages = bytes([1] * 3 + [0] * 253)
    with visit(start_server().url, scheme, width=width) as seen:
        page = seen.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.on("dialog", lambda dialog: dialog.accept("Renamed"))
        seen.until("Ready")
        # An answer with marks and thinking, streamed.
        chat.script = [
            Delta("", (66,), reasoning="Let me see."),
            Delta(ANSWER, (65,)),
            HOLD,
            Delta("", (69,), (), FinishReason.STOP, Usage(5, 9, 0)),
        ]
        seen.ask("Show me")
        page.wait_for_selector(".assistant[aria-busy=true] table")
        chat.release()
        seen.wait_for_answers(1)
        page.locator(".code .head button").click()
        seen.until_text(".code .head button", "Copied")
        page.click(".assistant .thinking summary")
        assert page.inner_text(".assistant .thinking div") == "Let me see."
        assert page.locator(".assistant math").count() == 1
        # A message that waits, and Esc.
        chat.script = SLOW
        chat.hold_again()
        seen.ask("two")
        seen.until_text(".assistant .body", "Begun")
        seen.ask("three")
        seen.until_text("#queue", "three")
        page.keyboard.press("Escape")
        seen.until_text(".assistant .note", "stopped")
        chat.wait_until_closed()
        assert page.input_value("#text") == "three"
        page.fill("#text", "")
        # Versions.
        chat.script = None
        page.locator(".assistant").last.get_by_text("Regenerate").click()
        seen.until_text(".assistant .body", "Hello")
        page.locator(".user").first.get_by_text("Edit").click()
        seen.ask("uno")
        seen.until_text(".user .body", "uno")
        seen.wait_for_answers(1)
        page.locator(".user").get_by_label("Earlier version").click()
        assert seen.texts[0] == "Show me"
        # Settings, a file and export.
        page.click("#settings-open")
        page.fill("#system", "Be kind.")
        page.fill("#temperature", "0.5")
        with page.expect_download() as exported:
            page.click("#export-markdown")
        assert "Show me" in exported.value.path().read_text()
        page.click("#settings .main")
        file = {"name": "a.py", "mimeType": "text/plain", "buffer": b"print()\n"}
        page.set_input_files("#files", [file])
        answered(seen, "Look")
        assert sent(chat)[-1][0] == ("system", "Be kind.")
        assert sent(chat)[-1][-1][1].startswith("Look\n\na.py:")
        assert chat.submitted[-1].params.temperature == 0.5
        # The engine.
        show(seen, "engine")
        seen.until_text("#requests", "request-")
        seen.until_text("#pages", "3 of 256 in use")
        colours = page.locator("#requests .swatch").evaluate_all(
            "all => all.map((one) => one.style.background)"
        )
        assert len(set(colours)) == 3
        assert page.evaluate(OVERFLOW) == 0
        # Chats: the terminal's, and this one in the terminal.
        terminal = Store.open(home / "chat.sqlite")
        other = terminal.create_chat("From the terminal").id
        terminal.add(other, None, Role.USER, "Is this shared?")
        assert "Show me" in {one.title for one in terminal.chats()}
        terminal.close()
        show(seen, "chats")
        page.fill("#search", "shared")
        page.locator("#chat-list .open", has_text="From the terminal").click()
        seen.until_text(".user .body", "Is this shared?")
        show(seen, "chats")
        seen.choose("Rename")
        seen.until_text("#chat-list .title", "Renamed")
        seen.choose("Delete")
        seen.until_text("#chats-note", "Deleted")
        assert seen.texts == []
        show(seen, "chats", is_shown=False)
        page.locator("#welcome").wait_for()
        assert page.evaluate(OVERFLOW) == 0
        assert seen.errors == []


def test_a_chat_with_a_key_goes_on_after_a_restart_and_a_reload(
    visit: Open, tmp_path: Path, home: Path
) -> None:
    env = {"MLXSERVE_HOME": str(home), "MLXSERVE_API_KEY": KEY}
    flags = ("--num-pages", "256")
    with served(tmp_path / "one", *flags, env=env) as first:
        port = str(first.port)
        with visit(first.url) as seen:
            seen.is_alone = True  # Chromium logs the 401
            seen.page.wait_for_selector("#key", state="visible")
            seen.page.fill("#key-text", KEY)
            seen.page.press("#key-text", "Enter")
            seen.until("Ready")
            seen.ask("Hello")
            seen.wait_for_answers(1)
            seen.page.wait_for_function("() => location.hash")
            before = seen.texts
            assert first.stop() == (0, "")
            seen.until("does not answer")
            with served(tmp_path / "two", "--port", port, *flags, env=env):
                seen.until("Ready")
                seen.reload()
                seen.page.wait_for_selector(".assistant")
                assert seen.texts == before
                seen.ask("What is a page?")
                seen.wait_for_answers(2)
                show(seen, "chats")
                seen.until_text("#chat-list .open", "Hello")
                assert seen.page.locator("#chat-list .open").count() == 1
                assert len(list((home / "chats").glob("*.sqlite"))) == 1, "a file of the key"
