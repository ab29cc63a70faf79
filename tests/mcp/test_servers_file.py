import json
from pathlib import Path
from typing import Any

import pytest

from mlxserve.mcp.servers_file import MAX_SIZE, ServerEntry, ToolsError, read_servers, usual_file
from tests.mcp.kept_settings import write_servers


def test_commands_and_urls_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = write_servers(
        tmp_path / "mcp.json",
        {
            "git": {
                "command": "uvx",
                "args": ["mcp-server-git"],
                "env": {"A": "1"},
                "type": "stdio",
            },
            "wiki": {"url": "https://wiki.example/mcp", "headers": {"X-Key": "k"}, "timeout": 5},
            "off": {"command": "x", "disabled": True},
        },
    )
    git, wiki, off = read_servers(file)
    assert (git.name, git.command, git.args, git.env) == (
        "git",
        "uvx",
        ("mcp-server-git",),
        {"A": "1"},
    )
    assert (wiki.url, wiki.headers, wiki.call_seconds) == (
        "https://wiki.example/mcp",
        {"X-Key": "k"},
        5.0,
    )
    assert off.is_disabled
    assert not git.is_disabled


def test_without_a_file_there_are_no_servers(tmp_path: Path) -> None:
    assert read_servers(tmp_path / "mcp.json") == []


def test_the_file_is_in_the_folder_of_settings() -> None:
    assert usual_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mlxserve/mcp.json")
    assert usual_file({}) == Path("~/.config/mlxserve/mcp.json").expanduser()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"mcpServers": {\n  "a": {"command": "x"\n}', "line 4"),
        ("[]", 'no object "mcpServers"'),
        ('{"mcpServers": []}', 'no object "mcpServers"'),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_damaged_json_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(ToolsError, match=r"mcp\.json") as error:
        read_servers(file)
    assert words in str(error.value)
    assert "Expected: {" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, 'either "command" or "url"'),
        ({"command": "x", "url": "http://y"}, 'either "command" or "url"'),
        ({"command": 3}, 'either "command" or "url"'),
        ({"url": "file:///etc/passwd"}, "http://"),
        ({"command": "x", "args": "y"}, '"args"'),
        ({"command": "x", "env": {"A": 1}}, '"env"'),
        ({"url": "http://x", "headers": []}, '"headers"'),
        ({"command": "x", "cwd": 1}, '"cwd"'),
        ({"command": "x", "timeout": 0}, '"timeout"'),
        ([], "not an object"),
    ],
)
def test_a_wrong_server_is_told_with_its_name_and_line(
    tmp_path: Path, fields: Any, words: str
) -> None:
    file = tmp_path / "mcp.json"
    servers = {"mcpServers": {"good": {"command": "x"}, "mine": fields}}
    file.write_text(json.dumps(servers, indent=1))
    with pytest.raises(ToolsError) as error:
        read_servers(file)
    assert words in str(error.value)
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if '"mine"' in text)
    assert f'line {line}: the server "mine"' in str(error.value)


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolsError, match="cannot be read"):
        read_servers(tmp_path)
    (tmp_path / "large").write_bytes(b" " * (MAX_SIZE + 1))
    with pytest.raises(ToolsError, match="more than"):
        read_servers(tmp_path / "large")


def test_an_address_shows_no_argument_and_no_query() -> None:
    entry = ServerEntry(name="a", command="/usr/bin/uvx", args=("--token", "secret"))
    assert entry.address == "uvx"
    assert ServerEntry(name="a", url="https://x/mcp?key=secret").address == "https://x/mcp"
