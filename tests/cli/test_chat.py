"""`mlxserve chat`: what it passes to the terminal, and what it says if the terminal cannot start."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxserve.api.access.keys import KeyFile, Scope, usual_file
from mlxserve.cli.own_key import OwnKey
from mlxserve.cli.running_servers import registered
from mlxserve.images.data_urls import file_of_data_url
from tests.cli.commands import Run, error_line, python


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a stand-in for the terminal was started with; it exits with 3."""
    asked: dict[str, Any] = {}

    def main(**kwargs: Any) -> int:
        asked.update(kwargs)
        return 3

    monkeypatch.setitem(sys.modules, "tui.launch", types.SimpleNamespace(main=main))
    return asked


def test_chat_passes_the_servers_flags_to_the_terminal(terminal: dict[str, Any], run: Run) -> None:
    args = ("chat", "--model", "org/name", "--num-pages", "9", "--no-enable-prefix-caching")
    assert run(*args).code == 3
    assert terminal.pop("read_key")("http://127.0.0.1:1") is None
    del terminal["read_document"]
    assert terminal == {
        "url": None,
        "model": None,
        "engine_args": [
            "--model", "org/name", "--num-pages", "9", "--no-enable-prefix-caching",
        ],
        "server_args": ["--keys-file", "none", "--max-num-seqs", "8"],
        "frame": None,
        "notice": "",
        "continues": False,
        "is_found": False,
    }  # fmt: skip


def test_the_terminal_reads_documents_as_run_does(
    terminal: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    assert run("chat").code == 3
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    name, url = terminal["read_document"](tmp_path / "a.txt", "a.txt")
    assert (name, file_of_data_url(url).decode()) == ("a.txt", "café")
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match=r"^a\.bin is not text\.$"):
        terminal["read_document"](tmp_path / "a.bin", "a.bin")


def test_the_number_of_requests_at_a_time_can_be_chosen(terminal: dict[str, Any], run: Run) -> None:
    assert run("chat", "--max-num-seqs", "3", "-c").code == 3
    assert terminal["server_args"] == ["--keys-file", "none"]
    assert terminal["engine_args"] == ["--max-num-seqs", "3"]
    assert terminal["continues"] is True


def test_chat_attaches_to_a_running_server(terminal: dict[str, Any], run: Run) -> None:
    assert run("chat", "--url", "http://127.0.0.1:9", "--model", "m").code == 3
    assert (terminal["url"], terminal["is_found"]) == ("http://127.0.0.1:9", False)
    assert (terminal["model"], terminal["engine_args"]) == ("m", [])


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A server of this user."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=False):
        yield


@pytest.mark.usefixtures("running")
def test_chat_uses_a_server_that_runs(terminal: dict[str, Any], run: Run) -> None:
    assert run("chat").code == 3
    assert (terminal["url"], terminal["is_found"]) == ("http://127.0.0.1:8123", True)
    assert "uses the server at http://127.0.0.1:8123 (org/served)" in terminal["notice"]


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    "flags", [("--own-server",), ("--model", "org/other"), ("--num-pages", "9")]
)
def test_chat_starts_a_server_of_its_own_where_that_is_asked(
    terminal: dict[str, Any], run: Run, flags: tuple[str, ...]
) -> None:
    assert run("chat", *flags).code == 3
    assert (terminal["url"], terminal["notice"]) == (None, "")


@pytest.mark.usefixtures("running")
def test_a_configured_model_needs_a_server_that_has_it(
    terminal: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_MODEL", "org/other")
    assert run("chat").code == 3
    assert terminal["url"] is None
    monkeypatch.setenv("MLXSERVE_MODEL", "org/served")
    assert run("chat").code == 3
    assert terminal["url"] == "http://127.0.0.1:8123"


def test_a_server_with_keys_is_used_by_who_has_one(
    terminal: dict[str, Any], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=True):
        assert run("chat").code == 3
        assert terminal["url"] is None
        monkeypatch.setenv("MLXSERVE_API_KEY", "a-key")
        assert run("chat").code == 3
        assert terminal["url"] == "http://127.0.0.1:8123"


@pytest.mark.parametrize("flags", [(), ("--url", "http://127.0.0.1:8123")])
def test_a_key_of_an_earlier_version_is_replaced_before_the_screen_is_drawn(
    terminal: dict[str, Any],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    secret = KeyFile(usual_file()).create("colleague", Scope.USER)
    OwnKey().keep("colleague", secret)
    with registered("http://127.0.0.1:8123", ["org/served"], needs_key=True):
        outcome = run("chat", *flags)
        assert (outcome.code, outcome.err.count("have a key of their own now")) == (3, 1)
        key = terminal["read_key"]("http://127.0.0.1:8123")
        assert key not in (None, secret)
        usual_file().chmod(0o644)
        assert terminal["read_key"]("http://127.0.0.1:8123") is None, "in an open chat"
        assert "chmod 600" in error_line(run("chat", *flags))


def test_another_package_named_tui_is_named(tmp_path: Path) -> None:
    (tmp_path / "tui").mkdir()
    (tmp_path / "tui" / "__init__.py").write_text("")
    info = tmp_path / "other_tui-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tui\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("tui\n")
    (info / "RECORD").write_text("tui/__init__.py,,\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['mlxserve', 'chat']\n"
        "from mlxserve.cli import main; main()\n"
    )
    line = error_line(python("-c", code))
    assert "'other-tui'" in line
    assert str(tmp_path / "tui" / "__init__.py") in line


def test_a_missing_dependency_of_the_terminal_is_named(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def main(**_: Any) -> int:
        import textual  # noqa: F401

        return 0

    monkeypatch.setitem(sys.modules, "tui.launch", types.SimpleNamespace(main=main))
    monkeypatch.setitem(sys.modules, "textual", None)
    assert "needs the package 'textual'" in error_line(run("chat"))
