"""Tools in the chat's window: a call is shown, confirmed, made, folded and told to the model."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from textual.widgets import OptionList

from mlxserve.history.calls import CallState
from mlxserve.history.messages import State
from tests.mcp.kept_settings import scripted, write_servers
from tests.mcp.scripted_server import TOOLS
from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open, Terminal
from tui.widgets.call_dialog import CallDialog
from tui.widgets.tools_dialog import ToolsDialog

ADD = scripts.call("s__add", '{"a": 20, "b": 22}')


@pytest.fixture
def t(terminal: Open, tmp_path: Path) -> AbstractAsyncContextManager[Terminal]:
    write_servers(tmp_path / "config" / "mlxserve" / "mcp.json", {"s": scripted()})
    return terminal()


def is_asking(t: Terminal) -> bool:
    return isinstance(t.app.screen, CallDialog)


async def choose(t: Terminal, number: int) -> None:
    await t.until(lambda: is_asking(t) and t.app.screen.query_one(OptionList).has_focus)
    await t.press(*["down"] * number, "enter")


async def test_a_confirmed_call_is_made_and_its_result_told_to_the_model(
    t: Terminal, server: FakeServer
) -> None:
    server.script(scripts.think("hm"), scripts.say("Let me add."), ADD, reason="tool_calls")
    server.script(scripts.say("It is 42."), scripts.usage(80, 5, cached=64))
    await t.ask("20 + 22?")
    await t.until(lambda: is_asking(t))
    for words in ("add of the server s", "Adds two numbers.", '"a": 20', "Always allow this tool"):
        assert words in t.screen
    await t.press("enter")  # nothing is chosen yet
    assert is_asking(t)
    await choose(t, 1)
    await t.until_answered("It is 42.")
    assert "Let me add." in t.screen
    assert '▸ s__add {"a": 20, "b": 22}' in t.screen
    first, second = server.requests
    assert [one["function"]["name"] for one in first["tools"]][:2] == ["s__add", "s__dies"]
    assert second["tools"] == first["tools"]
    called, result = second["messages"][-2:]
    assert (called["role"], called["content"]) == ("assistant", "Let me add.")
    assert called["tool_calls"][0]["function"] == {
        "name": "s__add",
        "arguments": '{"a": 20, "b": 22}',
    }
    assert result == {"role": "tool", "tool_call_id": "id-0", "content": "42"}
    await t.press("ctrl+t")
    await t.until_shown("│ 42")
    await t.talk("thanks")
    assert [m["role"] for m in server.requests[2]["messages"]] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]


@pytest.mark.parametrize("is_ours", [True, False])
async def test_an_image_of_a_result_is_sent_to_servers_of_mlxserve(
    terminal: Open, server: FakeServer, tmp_path: Path, is_ours: bool
) -> None:
    write_servers(tmp_path / "config" / "mlxserve" / "mcp.json", {"s": scripted()})
    server.model_fields = {"owned_by": "mlxserve"} if is_ours else {}
    server.script(scripts.call("s__image"), reason="tool_calls")
    server.script(scripts.say("A cat."))
    async with terminal() as t:
        await t.ask("What is there?")
        await choose(t, 1)
        await t.until_answered("A cat.")
    content = server.requests[1]["messages"][-1]["content"]
    if is_ours:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        assert content == [{"type": "text", "text": "(image of type image/png)"}, image]
    else:
        assert "not shown to models of this server" in content


async def test_a_prompt_and_a_resource_of_a_server_are_put_into_the_input(
    t: Terminal, server: FakeServer
) -> None:
    await t.until(lambda: "tools" in t.screen)
    await t.type("/s:g")
    await t.until_shown("/s:greet who [how]")
    await t.type("reet")
    await t.press("escape")
    await t.type(" Ada")
    await t.press("enter")
    await t.until(lambda: t.composer.text == "Greet Ada well.")
    assert server.requests == []
    t.composer.write("")
    await t.type("/attach s:note:///a")
    await t.press("enter")
    await t.until(lambda: t.composer.text.startswith("note:///a:\n````\n# A"))
    t.composer.write("/attach s:note:///picture")
    await t.press("enter")
    await t.until_shown("has no text")
    assert t.composer.text == "/attach s:note:///picture"


async def test_a_tool_that_is_always_allowed_is_asked_about_once(
    t: Terminal, server: FakeServer
) -> None:
    for _ in range(2):
        server.script(ADD, reason="tool_calls")
        server.script(scripts.say("42"))
    await t.ask("one")
    await choose(t, 2)
    await t.until_answered("42")
    await t.ask("two")
    await t.until(lambda: len(server.requests) == 4 and "Ready" in t.status)
    assert t.messages[-2:] == ["two", "42"]


async def test_a_refused_tool_is_not_called_and_one_refused_for_good_not_offered(
    t: Terminal, server: FakeServer
) -> None:
    server.script(ADD, scripts.call("s__huge", index=1), reason="tool_calls")
    server.script(scripts.say("Well."))
    await t.ask("one")
    await choose(t, 3)
    await choose(t, 4)
    await t.until_answered("Well.")
    results = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert results == ["The user did not allow this call."] * 2
    offered = [tool["function"]["name"] for tool in server.requests[1]["tools"]]
    assert "s__add" in offered
    assert "s__huge" not in offered
    assert "not allowed" in t.screen


async def test_esc_stops_a_running_call_and_the_question(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.call("s__never"), reason="tool_calls")
    await t.ask("one")
    await choose(t, 1)
    await t.until(lambda: "Calling s__never" in t.status)
    await t.press("escape")
    await t.until(lambda: "Stopped" in t.status)
    [call] = t.views[-1].message.rounds[0].calls
    assert (call.state, t.views[-1].message.state) == (CallState.STOPPED, State.STOPPED)
    server.script(ADD, reason="tool_calls")
    await t.ask("two")
    await t.until(lambda: is_asking(t))
    results = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert results == ["The user stopped this call."]
    await t.press("escape")
    await t.until(lambda: not is_asking(t) and "Stopped" in t.status)
    assert len(server.requests) == 2


async def test_an_answer_stopped_in_a_call_is_continued_with_what_it_has(
    t: Terminal, server: FakeServer
) -> None:
    server.script(ADD, scripts.call("s__never", index=1), reason="tool_calls")
    await t.ask("one")
    await choose(t, 1)
    await choose(t, 1)
    await t.until(lambda: "Calling s__never" in t.status)
    await t.press("escape")
    await t.until(lambda: "Stopped" in t.status)
    await t.ask("/continue")
    await t.until_answered()
    results = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert results == ["42", "The user stopped this call."]
    assert "continue_final_message" not in server.requests[1]
    assert [call.name for call in t.views[-1].message.rounds[0].calls] == ["s__add", "s__never"]


async def test_a_model_that_takes_no_tools_answers_without_them(
    t: Terminal, server: FakeServer
) -> None:
    await t.until(lambda: f"{len(TOOLS)} tools" in t.screen)
    server.script(scripts.refuse(400, "tools: how this model writes tool calls is not known"))
    await t.talk("one")
    assert "small does not take tools here" in t.screen
    assert ["tools" in request for request in server.requests] == [True, False]
    assert server.requests[0]["messages"] == server.requests[1]["messages"]


async def test_hostile_results_reach_the_screen_as_visible_characters(
    t: Terminal, server: FakeServer
) -> None:
    server.script(scripts.call("s__hostile"), reason="tool_calls")
    server.script(scripts.say("Done."))
    await t.ask("one")
    await t.until_shown("Says ␛[31mred␛[0m and ⟨U+202E⟩gnol.")
    await choose(t, 1)
    await t.until_answered("Done.")
    await t.press("ctrl+t")
    await t.until_shown("│ ␛]52;c;aGk=␇␛[2J⟨U+202E⟩ hidden")


async def test_tools_shows_and_switches_servers_and_tools(t: Terminal, server: FakeServer) -> None:
    await t.until(lambda: f"{len(TOOLS)} tools" in t.screen)
    await t.ask("/tools")
    await t.until(lambda: isinstance(t.app.screen, ToolsDialog))
    await t.until_shown(f"● s  {len(TOOLS)} tools  python")
    await t.until_shown("asks first  add")
    await t.press("down", "enter")
    await t.until_shown("always      add")
    await t.press("enter")
    await t.until_shown("never       add")
    await t.press("up", "enter")
    await t.until_shown("○ s  off")
    await t.press("escape")
    await t.talk("one")
    assert "tools" not in server.requests[0]


async def test_without_servers_tools_says_how_to_name_some(terminal: Open, tmp_path: Path) -> None:
    async with terminal() as t:
        await t.ask("/tools")
        await t.until_shown("mcpServers")
    (tmp_path / "config" / "mlxserve").mkdir(parents=True, exist_ok=True)
    (tmp_path / "config" / "mlxserve" / "mcp.json").write_text('{\n"mcpServers": [}')

    async with terminal() as t:
        await t.until_shown("line 2")
