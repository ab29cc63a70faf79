"""`mlxserve serve --background`, `ps`, `stop`, and what `chat` and `rm` make of a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.cli import servers
from mlxserve.cli.running_servers import RunningServer
from tests.cli.commands import CommandResult, Run, error_line, mlxserve

MODEL = "mlxserve-mini"


class Home:
    """Commands of one user, in this process where they start no other."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        self.run = run

    def start(self, *arguments: str) -> CommandResult:
        return mlxserve("serve", "--background", "--port", "0", *arguments)

    def servers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("ps", "--json").out)
        return found


@pytest.fixture
def home(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    found = Home(tmp_path, run)
    yield found
    if found.servers():
        found.run("stop", "--all")


def test_a_home_that_cannot_be_written_is_one_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    outcome = run("serve", "--background")
    assert "Set MLXSERVE_HOME" in error_line(outcome)


def test_a_server_in_the_background_is_listed_and_stopped(home: Home) -> None:
    assert "No server runs" in home.run("ps").out
    started = home.start("--num-pages", "64")
    assert started.code == 0, started.err
    assert started.out.startswith("mlxserve is ready at http://127.0.0.1:")
    url = started.out.splitlines()[0].rpartition(" ")[2]
    [server] = home.servers()
    assert (server["url"], server["model"], server["needs_key"]) == (url, MODEL, False)
    assert (server["num_requests_running"], server["num_requests_waiting"]) == (0, 0)
    assert url in home.run("ps").out
    assert "No server is 'other'" in error_line(home.run("stop", "other"))
    stopped = home.run("stop")
    assert stopped.out == f"Stopped {url} ({MODEL})\n"
    logs = home.run("logs", "-n", "200")
    assert f"mlxserve is ready at {url}" in logs.out
    assert str(home.folder / "logs") in logs.err
    assert home.servers() == []
    assert "No server of this user runs" in error_line(home.run("stop"))


@pytest.mark.long
def test_with_several_servers_stop_asks_which(home: Home) -> None:
    for _ in range(2):
        home.start("--num-pages", "64")
    first, second = home.servers()
    assert "Several servers run" in error_line(home.run("stop"))
    assert first["url"] in home.run("stop", str(first["pid"])).out
    assert [server["pid"] for server in home.servers()] == [second["pid"]]
    assert second["url"] in home.run("stop", second["url"].rpartition(":")[2]).out


def test_a_server_that_does_not_start_says_why(home: Home) -> None:
    done = home.start("--model", "./no-such-folder")
    assert done.code == 1
    assert "The server did not start" in done.err
    assert "no-such-folder" in done.err
    assert home.servers() == []


@pytest.mark.slow
def test_one_of_several_models_is_listed_and_unloaded_and_comes_back(
    home: Home, write_model: Callable[..., Path]
) -> None:
    for seed, name in enumerate(("big", "small"), 1):
        folder = home.folder / name
        folder.mkdir()
        write_model(folder, "qwen3", seed=seed)
    config = home.folder / "config.toml"
    config.write_text(
        "num_pages = 64\nkeep_alive = 30\n"
        f"[models.small]\nmodel = '{home.folder / 'small'}'\naliases = ['tiny']\n"
    )
    big = str(home.folder / "big")
    started = home.start("-m", big, "--config", str(config))
    assert started.code == 0, started.err
    [server] = home.servers()
    assert [one["state"] for one in server["models"]] == ["loaded", "unloaded"]
    body = {"prompt": "a", "max_tokens": 1, "model": "tiny"}
    reply = httpx.post(f"{server['url']}/v1/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["model"]) == (200, "small")
    shown = home.run("ps").out
    assert re.search(r"big .* GiB  idle, stays\n", shown)
    assert re.search(r"small .* GiB  idle, \d+ s left\n", shown)
    pin = {"model": "small", "pinned": True}
    httpx.post(f"{server['url']}/api/v1/models/load", json=pin, timeout=60).raise_for_status()
    assert re.search(r"small .* GiB  idle, pinned\n", home.run("ps").out)
    assert "Unloaded small" in home.run("stop", "small").out
    assert [one["state"] for one in home.servers()[0]["models"]] == ["loaded", "unloaded"]
    assert httpx.post(f"{server['url']}/v1/completions", json=body, timeout=60).status_code == 200
    assert home.run("stop").out == f"Stopped {server['url']} (big)\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-m", MODEL, "-m", "smollm2", "--alias", "smollm2"), "Two models are called 'smollm2'"),
        (("-m", MODEL, "-m", "./no-such-folder"), "no-such-folder"),
        (("-m", MODEL, "-m", "smollm2", "-tp", "2"), "Several ranks serve one model"),
        (("--keep-alive", "soon"), "--keep-alive must be a number of seconds or a duration"),
    ],
)
def test_models_that_cannot_be_served_together_are_one_line(
    home: Home, options: tuple[str, ...], says: str
) -> None:
    assert says in error_line(home.run("serve", "--port", "0", *options))


@pytest.mark.long
def test_a_document_is_computed_once_for_all_questions_also_after_a_restart(
    home: Home, tmp_path: Path
) -> None:
    file = tmp_path / "contract.txt"
    file.write_text("".join(f"Paragraph {n} says that pages stay.\n" for n in range(50)))

    def asked(question: str, *flags: str) -> float:
        done = mlxserve("run", "-f", str(file), question, "--stats", "--max-tokens", "2", *flags)
        assert done.code == 0, done.err
        label = r"prompt ([\d,]+) tokens \((?:0 cached|.* ([\d,]+) tokens? computed)\)"
        found = re.search(label, done.err)
        assert found is not None, done.err
        num_tokens, num_computed = (
            int((each or found[1]).replace(",", "")) for each in found.groups()
        )
        return 1 - num_computed / num_tokens

    disk = ("--disk-cache-size", "1", "--disk-cache-dir", str(tmp_path / "pages"))
    home.start(*disk)
    assert asked("When does it end?") == 0
    assert asked("Who signed it?") >= 0.95
    assert asked("What is paragraph 7?", "--system", "It is Monday.") >= 0.95
    assert home.run("stop").code == 0
    home.start(*disk)
    assert asked("Where is it?") >= 0.95


def test_stop_leaves_a_chats_server_unless_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = RunningServer(1, "http://127.0.0.1:1", "shared", 0.0)
    chats = RunningServer(2, "http://127.0.0.1:2", "chats", 0.0, is_private=True)
    ended: list[int] = []
    there = [shared, chats]

    def end(pid: int, _signal: int) -> None:
        ended.append(pid)
        there[:] = [server for server in there if server.pid != pid]

    monkeypatch.setattr(servers, "running_servers", lambda: list(there))
    monkeypatch.setattr("mlxserve.cli.servers.os.kill", end)
    servers.stop()
    assert ended == [1]
    servers.stop()
    assert ended == [1, 2], "there was no other"
    there[:], ended[:] = [shared, chats], []
    servers.stop("2")
    assert ended == [2]
    there[:], ended[:] = [shared, chats], []
    servers.stop(every=True)
    assert sorted(ended) == [1, 2]


def test_ps_says_which_server_is_a_chats(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = RunningServer(2, "http://127.0.0.1:2", "chats", 0.0, is_private=True)
    monkeypatch.setattr(servers, "running_servers", lambda: [chats])
    assert "of an open chat" in run("ps").out
