"""`mlxserve chat`: what it passes to the terminal, and what it says if the terminal cannot start."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

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
    assert terminal == {
        "url": None,
        "model": None,
        "engine_args": [
            "--model", "org/name", "--num-pages", "9", "--no-enable-prefix-caching",
        ],
        "server_args": ("--keys-file", "none"),
        "frame": None,
    }  # fmt: skip


def test_chat_attaches_to_a_running_server(terminal: dict[str, Any], run: Run) -> None:
    assert run("chat", "--url", "http://127.0.0.1:9", "--model", "m").code == 3
    assert terminal["url"] == "http://127.0.0.1:9"
    assert (terminal["model"], terminal["engine_args"]) == ("m", [])


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
