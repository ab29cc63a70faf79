from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlxserve.cli.running_servers import (
    newest_server,
    registered,
    running_servers,
    served_name,
    serves,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return tmp_path


def put(home: Path, **fields: object) -> Path:
    known = {
        "pid": os.getpid(),
        "url": "http://127.0.0.1:1",
        "model": "m",
        "started": psutil.Process().create_time(),
    }
    file = home / "servers" / f"{fields.get('pid', os.getpid())}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**known, **fields}))
    return file


def _begin_of(pid: int) -> float:
    return psutil.Process(pid).create_time()


def test_a_server_is_found_while_it_runs(home: Path) -> None:
    assert running_servers() == []
    with registered("http://0.0.0.0:8000", ["small"], needs_key=True):
        [found] = running_servers()
        assert (found.pid, found.url, found.model, found.needs_key) == (
            os.getpid(), "http://127.0.0.1:8000", "small", True,
        )  # fmt: skip
        [file] = (home / "servers").glob("*.json")
        assert (home / "servers").stat().st_mode & 0o077 == 0
    assert running_servers() == []
    assert not file.exists()


def test_a_server_that_was_killed_is_forgotten(home: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = put(home, pid=ended.pid)
    assert running_servers() == []
    assert not file.exists()


def test_another_program_with_the_same_id_is_no_server(home: Path) -> None:
    file = put(home, started=psutil.Process().create_time() - 60)
    assert running_servers() == []
    assert not file.exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"pid": 1, "other": 2}', "\x00", "[" * 100_000, '{"pid": 1e400}'],
    ids=lambda content: content[:20],
)
def test_a_damaged_file_is_removed(home: Path, content: str) -> None:
    file = put(home)
    file.write_text(content)
    assert running_servers() == []
    assert not file.exists()


@pytest.mark.parametrize(
    "field",
    [{"pid": -1}, {"pid": 0}, {"pid": 1.5}, {"pid": 1 << 40}, {"pid": "1"}, {"started": "now"},
     {"url": 3}, {"model": None}],
    ids=str,
)  # fmt: skip
def test_a_file_with_odd_values_hides_no_other_server(home: Path, field: dict[str, object]) -> None:
    odd = put(home, **field).rename(home / "servers" / "odd.json")
    put(home)
    assert [server.pid for server in running_servers()] == [os.getpid()]
    assert not odd.exists()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_hides_no_server(home: Path, kind: str) -> None:
    put(home)
    odd = home / "servers" / "1.json"
    os.mkfifo(odd) if kind == "fifo" else (odd / "inner").mkdir(parents=True)
    assert [server.pid for server in running_servers()] == [os.getpid()]


def test_the_oldest_comes_first(home: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        put(home, pid=child.pid, started=psutil.Process(child.pid).create_time(), model="new")
        put(home, model="old")
        assert [server.model for server in running_servers()] == ["old", "new"]
    finally:
        child.kill()
        child.communicate()


def test_a_chats_server_is_listed_and_asked_only_where_no_other_has_the_model(home: Path) -> None:
    started = psutil.Process().create_time()
    put(home, model="shared")
    put(home, pid=os.getppid(), model="chats", is_private=True, started=_begin_of(os.getppid()))
    assert {server.model for server in running_servers()} == {"shared", "chats"}
    assert newest_server("chats") is None
    private = newest_server("chats", takes_private=True)
    assert private is not None
    assert private.is_private
    put(home, model="chats", started=started)
    other = newest_server("chats", takes_private=True)
    assert other is not None
    assert not other.is_private


def test_a_folder_that_cannot_be_written_stops_no_server(home: Path) -> None:
    (home / "servers").write_text("a file")
    with registered("http://127.0.0.1:1", ["small"], needs_key=False):
        assert running_servers() == []


def test_a_server_is_known_by_every_way_to_name_its_model(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with registered("http://127.0.0.1:1", ["mlx-community/Qwen3-4B-4bit"], needs_key=True):
        [server] = running_servers()
        assert all(serves(server, name) for name in (None, "qwen3:4b", server.model))
        assert not any(serves(server, name) for name in ("qwen3:8b", "org/other"))
        assert newest_server("qwen3:4b") == server
        assert newest_server("qwen3:4b", has_key=lambda: False) is None
        assert newest_server("qwen3:8b") is None
    with registered("http://127.0.0.1:1", ["mine"], needs_key=False):
        assert newest_server(str(tmp_path / "mine")) is not None
        assert newest_server(str(tmp_path)) is None
    with registered("http://127.0.0.1:1", ["mine"], ["mine:coder"], needs_key=False):
        [server] = running_servers()
        assert (server.others, server.adapters) == ((), ("mine:coder",))
        assert served_name(server, "mine:coder") == "mine:coder"
        assert not serves(server, "mine:poet")
    with registered("http://127.0.0.1:1", ["first", "mine", "other"], needs_key=False):
        [server] = running_servers()
        assert served_name(server, None) == "first"
        assert served_name(server, str(tmp_path / "mine")) == "mine"
        assert served_name(server, "qwen3:4b") is None
