"""Saved prompts on the page, in headless Chromium: saved, chosen for a chat, replaced and deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.history import saved_prompts
from mlxserve.history.store import Store
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open
from tests.api.serving import StartServer

pytestmark = pytest.mark.slow


def test_a_prompt_is_saved_and_a_chat_begins_with_it(
    chat: FakeChat,
    start_server: StartServer,
    visit: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store.open(tmp_path / "chat.sqlite")
    store.prompts.save("Plain <b>", "Answer plainly.", {"temperature": 0.5, "effort": "low"})
    url = start_server().url
    with visit(url) as seen:
        page = seen.page
        seen.until_text("#welcome", "Chats with the same prompt share its pages")
        page.locator("#welcome .prompts button", has_text="Plain <b>").click()
        page.locator("#welcome .prompts [aria-pressed=true]").wait_for()
        seen.ask("Why?")
        seen.wait_for_answers(1)
        [asked] = chat.rendered
        assert [one["content"] for one in asked.messages] == ["Answer plainly.", "Why?"]
        assert chat.submitted[0].params.temperature == 0.5
        page.click("#settings-open")
        page.wait_for_function("() => document.getElementById('prompt').selectedIndex === 1")
        assert page.input_value("#effort") == "low"
        page.fill("#system", "Answer in verse.")
        page.fill("#top_k", "7")
        page.fill("#prompt-name", "Verse")
        page.press("#prompt-name", "Enter")
        seen.until_text("#prompt-note", "Saved as Verse.")
        assert [prompt.name for prompt in store.prompts.all()] == ["Plain <b>", "Verse"]
        assert store.prompts.all()[1].sampling == {"temperature": 0.5, "top_k": 7, "effort": "low"}
        page.select_option("#prompt", label="Plain <b>")
        assert page.input_value("#system") == "Answer plainly."
        assert page.input_value("#top_k") == ""
        page.click("#prompt-delete")
        seen.until_text("#prompt-note", "Plain <b> was deleted")
        assert seen.errors == []
        monkeypatch.setattr(saved_prompts, "MAX_PROMPTS", 1)
        seen.is_alone = True  # Chromium logs the refusal
        page.fill("#prompt-name", "One more")
        page.click("#prompt-save")
        seen.until_text("#prompt-note", "1 prompts are saved already. Delete one of them first.")
    store.close()
