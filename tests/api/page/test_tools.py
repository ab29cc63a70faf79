"""Tools of the page's chat in headless Chromium: shown, confirmed, called by this server, folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxserve.core.errors import InvalidParameter
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import FakeChat
from tests.api.page.visits import Open, Visit
from tests.api.serving import StartServer
from tests.mcp import scripted_server
from tests.mcp.kept_settings import scripted, write_servers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_servers(tmp_path / "config" / "mlxserve" / "mcp.json", {"s": scripted()})


def calling(name: str, arguments: str) -> list[Delta]:
    call = ToolCallDelta(0, id="call_1", name=name, arguments=arguments)
    return [
        Delta("Let me see.", (66,)),
        Delta("", (67,), (), FinishReason.STOP, Usage(5, 2, 0), tool_calls=(call,)),
    ]


def asked(chat: FakeChat, seen: Visit, name: str, arguments: str = "{}") -> None:
    """A question for which the model calls a tool, and then says "Hello"."""
    chat.script = calling(name, arguments)
    seen.ask("Well?")
    seen.page.locator("#call").wait_for()
    chat.script = None


def test_a_call_is_confirmed_made_shown_folded_and_told_to_the_model(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    url = start_server().url
    with visit(url) as seen:
        seen.until("Ready")
        asked(chat, seen, "s__add", '{"a": 20, "b": 22}')
        assert seen.page.inner_text("#call-name") == "s__add"
        assert seen.page.inner_text("#call-description") == "Adds two numbers."
        assert '"a": 20' in seen.page.inner_text("#call-arguments")
        assert seen.page.evaluate("document.activeElement.id") == "call-not-now"
        seen.page.click("#call-once")
        seen.until_text(".assistant .body", "Hello")
        assert "s__add" in seen.page.inner_text(".call summary")
        assert seen.page.locator(".call > div").is_hidden()
        seen.page.click(".call summary")
        assert seen.page.inner_text(".call > div") == "42"
        last = chat.rendered[-1]
        assert [one["role"] for one in last.messages] == ["user", "assistant", "tool"]
        assert last.messages[-1]["content"] == "42"
        assert "s__add" in {tool["function"]["name"] for tool in last.tools}
        seen.reload()  # the call is kept with its chat, and sent with the next question
        seen.until_text(".call summary", "s__add")
        seen.ask("And?")
        seen.wait_for_answers(2)
        roles = [one["role"] for one in chat.rendered[-1].messages]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert seen.errors == []
        assert seen.hosts == {url.partition("//")[2].strip("/")}


def test_a_tool_is_refused_for_good_and_another_allowed_for_good(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        asked(chat, seen, "s__huge")
        seen.page.click("#call-never")
        seen.wait_for_answers(1)
        assert chat.rendered[-1].messages[-1]["content"] == "The user did not allow this call."
        names = {tool["function"]["name"] for tool in chat.rendered[-1].tools}
        assert "s__huge" not in names
        assert "s__fails" in names
        asked(chat, seen, "s__fails")
        seen.page.click("#call-always")
        seen.wait_for_answers(2)
        assert chat.rendered[-1].messages[-1]["content"] == "no luck"
        seen.until_text(".call.failed summary", "failed")
        seen.page.click("#settings-open")
        seen.page.click("#tools-open")
        choices = seen.page.locator(".tool select")
        choices.first.wait_for()
        names = list(scripted_server.TOOLS)
        assert choices.nth(names.index("huge")).input_value() == "never"
        assert choices.nth(names.index("fails")).input_value() == "always"
        seen.page.get_by_role("button", name="Switch off s").click()
        seen.page.get_by_role("button", name="Start s").wait_for()
        seen.page.keyboard.press("Escape")
        seen.ask("And?")
        seen.wait_for_answers(3)
        assert chat.rendered[-1].tools == []
        assert seen.errors == []


def test_escape_stops_the_question_and_a_running_call(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url) as seen:
        seen.until("Ready")
        asked(chat, seen, "s__never")
        seen.page.keyboard.press("Escape")
        seen.until_text(".assistant .note", "stopped")
        assert seen.page.locator("#call").is_hidden()
        asked(chat, seen, "s__never")
        seen.page.click("#call-once")
        seen.until_text(".call.running summary", "running")
        seen.page.keyboard.press("Escape")
        seen.page.wait_for_function("() => document.querySelectorAll('.call.stopped').length === 2")
        assert len(chat.rendered) == 2
        assert seen.errors == []


def test_a_server_that_fails_is_told_and_one_that_was_added_is_used(
    chat: FakeChat, start_server: StartServer, visit: Open, tmp_path: Path
) -> None:
    file = tmp_path / "config" / "mlxserve" / "mcp.json"
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.ask("One?")
        seen.wait_for_answers(1)
        write_servers(file, {"s": scripted(), "gone": {"command": "no-such-command"}})
        seen.ask("Two?")
        seen.wait_for_answers(2)
        seen.until_text("#tools-problem", "there is no command 'no-such-command' here")
        write_servers(file, {"other": scripted()})
        seen.ask("Three?")
        seen.wait_for_answers(3)
        seen.page.locator("#tools-problem").wait_for(state="hidden")
        names = [{tool["function"]["name"][:3] for tool in each.tools} for each in chat.rendered]
        assert names == [{"s__"}, {"s__"}, {"oth"}]
        assert seen.errors == []


def test_a_model_that_cannot_call_answers_without_tools(
    chat: FakeChat, start_server: StartServer, visit: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_all = chat.submit_all

    async def refusing(*given: Any, **named: Any) -> Any:
        if chat.rendered[-1].tools:
            raise InvalidParameter("tools", "how this model writes tool calls is not known")
        return await submit_all(*given, **named)

    monkeypatch.setattr(chat, "submit_all", refusing)
    with visit(start_server().url) as seen:
        seen.until("Ready")
        seen.is_alone = True  # the refusal is a line of the console
        seen.ask("Well?")
        seen.until_text(".assistant .body", "Hello")
        assert [bool(each.tools) for each in chat.rendered] == [True, False]


def test_hostile_tools_are_shown_as_text(
    chat: FakeChat, start_server: StartServer, visit: Open
) -> None:
    with visit(start_server().url, width=320, height=600) as seen:
        seen.until("Ready")
        asked(chat, seen, "s__hostile", '{"html": "<img src=x onerror=alert(1)>"}')
        assert "⟨U+202E⟩gnol" in seen.page.inner_text("#call-description")
        assert "<img src=x" in seen.page.inner_text("#call-arguments")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 320
        seen.page.click("#call-once")
        seen.wait_for_answers(1)
        seen.page.click(".call summary")
        assert "⟨U+202E⟩ hidden" in seen.page.inner_text(".call > div")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 320
        assert seen.errors == []
