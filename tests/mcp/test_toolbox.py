import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from mlxserve.mcp import connection
from mlxserve.mcp.results import MAX_RESULT
from mlxserve.mcp.servers_file import ToolsError
from mlxserve.mcp.session import ServerState
from mlxserve.mcp.toolbox import Permission, Toolbox, unique_name
from tests.mcp.kept_settings import KeptSettings, python, scripted, write_servers


@asynccontextmanager
async def started(
    file: Path, servers: dict[str, Any], settings: KeptSettings | None = None
) -> AsyncGenerator[Toolbox, None]:
    """A toolbox that has started."""
    kept = KeptSettings() if settings is None else settings
    toolbox = Toolbox(write_servers(file, servers), kept)
    await toolbox.start()
    try:
        yield toolbox
    finally:
        await toolbox.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mcp.json"


@pytest.fixture
def http_server() -> Iterator[str]:
    """The package's server over streamable HTTP."""
    from tests.mcp.package_server import server as package_server  # takes a second

    listening = socket.create_server(("127.0.0.1", 0))
    app = package_server.streamable_http_app()
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    running.should_exit = True
    thread.join()
    listening.close()


@pytest.mark.slow  # the package takes seconds to import, here and in the process
async def test_servers_of_the_package_answer_over_stdio_and_http(
    file: Path, http_server: str
) -> None:
    here = python("-m", "tests.mcp.package_server")
    async with started(file, {"here": here, "there": {"url": http_server}}) as toolbox:
        assert [card.problem for card in toolbox.cards] == ["", ""]
        assert [tool.name for tool in toolbox.offered()] == [
            *("here__fail", "here__greet", "there__fail", "there__greet")
        ]
        [greet] = [tool for tool in toolbox.offered() if tool.name == "here__greet"]
        assert greet.definition["function"]["parameters"]["required"] == ["name"]
        for name in ("here__greet", "there__greet"):
            result = await toolbox.call(name, '{"name": "Ada"}')
            assert (result.text, result.is_error) == ("Hello, Ada!", False)
        failed = await toolbox.call("there__fail", "{}")
        assert failed.is_error
        assert "fail" in failed.text


async def test_half_of_an_emoji_is_replaced_on_the_way_to_a_server_and_back(file: Path) -> None:
    """The client would wait for the answer until its time is up, and lose the connection on the way there."""
    async with started(file, {"s": scripted()}) as toolbox:
        for arguments in ("{}", '{"a": 1}'):
            assert (await toolbox.call("s__half", arguments)).text == "a\ufffd"
        for arguments, expected in [
            (r'{"a": "\ud83d x"}', {"a": "\ufffd x"}),
            (r'{"\ude00": ["\ud83d\ude00"]}', {"\ufffd": ["😀"]}),
        ]:
            result = await toolbox.call("s__echo", arguments)
            assert (json.loads(result.text), result.is_error) == (expected, False)
        for number in ("NaN", "-Infinity", "1e999"):
            refused = await toolbox.call("s__echo", f'{{"a": {number}}}')
            assert refused.is_error
            assert number in refused.text
        assert toolbox.cards[0].state is ServerState.READY


async def test_a_command_gets_no_key_and_ends_with_the_toolbox(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret")
    facts: dict[str, Any] = {}

    async with started(
        file, {"s": scripted(str(tmp_path / "facts"), env={"MINE": "1"})}
    ) as toolbox:
        assert (await toolbox.call("s__add", '{"a": 1, "b": 2}')).text == "3"
        facts.update(json.loads((tmp_path / "facts").read_text()))
        assert psutil.pid_exists(facts["pid"])
    assert not psutil.pid_exists(facts["pid"])
    assert "MLXSERVE_API_KEY" not in facts["env"]
    assert facts["env"]["MINE"] == "1"
    assert facts["env"]["HOME"] == os.environ["HOME"]


async def test_what_a_tool_returns_is_bounded_and_failures_are_results(file: Path) -> None:
    async with started(file, {"s": scripted()}) as toolbox:
        huge = await toolbox.call("s__huge", "{}")
        assert huge.text.startswith("start ")
        assert huge.text.endswith(" end")
        assert len(huge.text) < MAX_RESULT + 100
        fails = await toolbox.call("s__fails", "{}")
        assert (fails.text, fails.is_error) == ("no luck", True)
        image = await toolbox.call("s__image", "{}")
        assert (image.text, image.images) == (
            "(image of type image/png)",
            ("data:image/png;base64,aGk=",),
        )
        for arguments, words in (("{", "not JSON"), ("[1]", "not a JSON object")):
            result = await toolbox.call("s__add", arguments)
            assert result.is_error
            assert words in result.text
        unknown = await toolbox.call("s__nonesuch", "{}")
        assert "There is no tool 's__nonesuch'. There are: s__add," in unknown.text


async def test_a_call_ends_at_its_time_limit_or_when_it_is_cancelled_and_the_server_goes_on(
    file: Path,
) -> None:
    async with started(file, {"s": scripted(timeout=0.2), "slow": scripted()}) as toolbox:
        late = await toolbox.call("s__never", "{}")
        assert late.is_error
        assert "did not answer within 0.2 seconds" in late.text
        calling = asyncio.ensure_future(toolbox.call("slow__never", "{}"))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        # It has 0.2 s, too, which a busy machine may need: then it is cancelled itself.
        while not (told := (await toolbox.call("s__told", "{}")).text).startswith("cancelled: "):
            assert "did not answer within 0.2 seconds" in told
        assert told != "cancelled: 0"
        assert (await toolbox.call("slow__add", '{"a": 1, "b": 1}')).text == "2"


async def test_prompts_and_resources_of_a_server_are_texts(file: Path) -> None:
    async with started(file, {"s": scripted()}) as toolbox:
        greet, dies = toolbox.prompts
        assert (greet.command, greet.usage, dies.usage) == ("s:greet", "who [how]", "")
        for typed, text in [
            ("Ada", "Greet Ada well."),
            ("'Ada L' very  warmly", "Greet Ada L very warmly."),
            ("it's fine", "Greet it's fine."),
        ]:
            assert await toolbox.prompt(greet, typed) == text
        with pytest.raises(ToolsError, match="/s:greet needs who: who"):
            await toolbox.prompt(greet, "")
        with pytest.raises(ToolsError, match="there is none"):
            await toolbox.prompt(dies, "")
        notes, picture = toolbox.resources
        assert notes.address == "s:note:///a"
        assert await toolbox.resource(notes) == "# A\n```\nhalf \ufffd\n```"
        with pytest.raises(ToolsError, match="has no text"):
            await toolbox.resource(picture)
        await toolbox.switch("s", is_on=False)
        assert (toolbox.prompts, toolbox.resources) == ([], [])
        with pytest.raises(ToolsError, match="not running"):
            await toolbox.resource(notes)


async def test_what_a_server_asks_of_the_client_is_refused_by_a_sentence(file: Path) -> None:
    async with started(file, {"s": scripted()}) as toolbox:
        told = await toolbox.call("s__reports", "{}")
        assert told.text == "Sampling not supported Elicitation not supported"


async def test_a_server_that_dies_is_a_sentence_and_starts_again(file: Path) -> None:
    async with started(file, {"s": scripted()}) as toolbox:
        dead = await toolbox.call("s__dies", "{}")
        assert dead.is_error
        assert "s has ended." in dead.text
        [card] = toolbox.cards
        assert card.state is ServerState.FAILED
        assert "out of cheese" in card.problem
        assert toolbox.offered() == []
        await toolbox.switch("s", is_on=True)
        assert (await toolbox.call("s__add", '{"a": 2, "b": 2}')).text == "4"


async def test_servers_that_do_not_start_say_why_and_hold_up_no_other(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    servers = {
        "absent": {"command": "nonesuch-command"},
        "broken": python("-c", "import nonesuch"),
        "away": {"url": f"http://127.0.0.1:{port}/mcp"},
        "good": scripted(),
    }
    async with started(file, servers) as toolbox:
        problems = {card.name: card.problem for card in toolbox.cards}
        assert "no command 'nonesuch-command'" in problems["absent"]
        assert "No module named 'nonesuch'" in problems["broken"]
        assert problems["away"].startswith("away did not start:")
        assert problems["good"] == ""
        assert {tool.server for tool in toolbox.offered()} == {"good"}


async def test_without_the_package_a_server_says_how_to_install_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)

    async with started(file, {"s": scripted()}) as toolbox:
        assert toolbox.cards[0].problem.startswith(connection.MISSING)


async def test_a_choice_is_kept_until_the_tool_is_described_otherwise(file: Path) -> None:
    settings = KeptSettings()

    async with started(file, {"s": scripted()}, settings) as toolbox:
        await toolbox.permit("s__add", Permission.ALWAYS)
        await toolbox.permit("s__huge", Permission.NEVER)
        assert toolbox.tool("s__huge") is None
    async with started(file, {"s": scripted()}, settings) as toolbox:
        add = toolbox.tool("s__add")
        assert add is not None
        assert add.permission is Permission.ALWAYS
        assert toolbox.tool("s__huge") is None
        assert "There is no tool" in (await toolbox.call("s__huge", "{}")).text
    async with started(file, {"s": scripted(env={"OTHER": "1"})}, settings) as toolbox:
        add = toolbox.tool("s__add")
        assert add is not None
        assert add.permission is Permission.ASK
        assert toolbox.tool("s__huge") is None


async def test_a_server_is_switched_off_and_stays_off(file: Path) -> None:
    settings = KeptSettings()

    async with started(file, {"s": scripted()}, settings) as toolbox:
        await toolbox.switch("s", is_on=False)
        assert toolbox.offered() == []
    async with started(file, {"s": scripted()}, settings) as toolbox:
        [card] = toolbox.cards
        assert (card.state, card.is_on) == (ServerState.OFF, False)
        await toolbox.switch("s", is_on=True)
        assert toolbox.offered() != []


def damage(file: Path) -> None:
    file.write_text("{")


async def test_choices_of_another_program_hold_from_the_next_answer_on(file: Path) -> None:
    """The terminal and the server have a toolbox each over the same settings."""
    settings, servers = KeptSettings(), {"s": scripted()}
    async with started(file, servers, settings) as here, started(file, servers, settings) as there:
        await here.permit("s__add", Permission.ALWAYS)
        await there.refresh()
        assert there.tool("s__add").permission is Permission.ALWAYS  # type: ignore[union-attr]
        await here.permit("s__add", Permission.NEVER)
        await there.refresh()
        assert there.tool("s__add") is None
        await here.switch("s", is_on=False)
        await there.refresh()
        assert there.offered() == []
        assert [card.is_on for card in there.cards] == [False]
        await here.switch("s", is_on=True)
        await there.refresh()
        assert there.offered()


async def test_a_file_that_has_changed_is_read_again_and_servers_that_stay_go_on(
    file: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"  # written by the server when it starts
    same = scripted(str(notes))

    async with started(file, {"s": same}) as toolbox:
        process = json.loads(notes.read_text())["pid"]
        notes.unlink()
        write_servers(file, {"s": same, "t": scripted(), "u": {"command": "no-such-command"}})
        await toolbox.start()
        assert {tool.server for tool in toolbox.offered()} == {"s", "t"}
        assert toolbox.cards[2].state is ServerState.FAILED
        assert not notes.exists()
        damage(file)
        await toolbox.start()
        assert "line 1" in toolbox.problem
        assert {tool.server for tool in toolbox.offered()} == {"s", "t"}
        assert psutil.pid_exists(process)
        write_servers(file, {"t": scripted(env={"OTHER": "1"})})
        await toolbox.start()
        assert [card.name for card in toolbox.cards] == ["t"]
        assert not psutil.pid_exists(process)
        write_servers(file, {})
        await toolbox.start()
        assert toolbox.offered() == []


async def test_a_damaged_file_is_a_problem_and_no_failure(file: Path) -> None:
    damage(file)

    toolbox = Toolbox(file, KeptSettings())
    await toolbox.start()
    assert "line 1" in toolbox.problem
    assert toolbox.cards == []
    await toolbox.close()


def test_names_are_unique_and_of_the_api() -> None:
    names = {
        unique_name(server, tool)
        for server, tool in [
            ("a", "b"),
            ("a__b", "c"),
            ("a", "b__c"),
            ("ä", "b"),
            ("ö", "b"),
            ("a", "x" * 90),
        ]
    }
    assert len(names) == 6
    assert "a__b" in names
    for name in names:
        assert len(name) <= 64
        assert name.replace("_", "").replace("-", "").isalnum()
        assert name.isascii()
