import grp
import json
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's, whose group has others as well."""
    staff = SimpleNamespace(gr_name="staff", gr_mem=["eve"])
    monkeypatch.setattr(grp, "getgrgid", lambda _: staff)
    folder = tmp_path / "mlxserve"
    folder.mkdir(mode=0o700)
    file = write_servers(folder / "mcp.json", {"a": {"command": "x"}})
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("mode", [0o602, 0o622, 0o620, 0o666, 0o777])
@pytest.mark.parametrize("is_folder", [False, True])
def test_commands_that_others_may_write_are_not_run(
    servers: Path, mode: int, is_folder: bool
) -> None:
    path = servers.parent if is_folder else servers
    path.chmod(mode | 0o700 if is_folder else mode)
    with pytest.raises(ToolsError, match=r"others may write to .*chmod go-w /"):
        read_servers(servers)


def test_a_folder_of_all_in_which_names_are_kept_is_as_good_as_another(servers: Path) -> None:
    servers.parent.chmod(0o1777)  # such as /tmp
    assert len(read_servers(servers)) == 1


def test_commands_of_another_user_are_not_run(
    servers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.getuid()
    monkeypatch.setattr("mlxserve.mcp.servers_file.ROOT", me + 1)
    assert len(read_servers(servers)) == 1
    monkeypatch.setattr(os, "getuid", lambda: me + 2)
    with pytest.raises(ToolsError, match=r"mcp\.json belongs to another user"):
        read_servers(servers)


def test_the_folder_that_a_link_leads_to_is_looked_at_as_well(
    servers: Path, tmp_path: Path
) -> None:
    link = tmp_path / "mcp.json"
    link.symlink_to(servers)
    assert len(read_servers(link)) == 1
    servers.parent.chmod(0o777)
    with pytest.raises(ToolsError, match="others may write to"):
        read_servers(link)


@pytest.mark.parametrize(
    ("name", "members", "is_run"),
    [("me", [], True), ("me", ["me"], True), ("me", ["eve"], False), ("staff", [], False)],
)
def test_a_group_of_the_user_alone_may_write(
    servers: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], is_run: bool
) -> None:
    """Where each user has a group, files are made with mode 0664."""
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    servers.chmod(0o664)
    if is_run:
        assert len(read_servers(servers)) == 1
    else:
        with pytest.raises(ToolsError, match="others may write to"):
            read_servers(servers)
