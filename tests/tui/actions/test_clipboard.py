import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App

from tui.actions.clipboard import copy


def copied(text: str) -> str:
    async def run() -> str:
        app = App[None]()
        async with app.run_test(notifications=True):
            copy(app, text)
            return app.clipboard

    return asyncio.run(run())


@pytest.fixture
def pbcopy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Installs this script as pbcopy, and returns a file for its output."""

    def install(script: str) -> Path:
        program = tmp_path / "pbcopy"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "board"

    return install


def test_text_is_copied_through_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: None)
    assert copied("some é") == "some é"


def test_pbcopy_gets_the_text_if_it_exists(pbcopy: Callable[[str], Path], tmp_path: Path) -> None:
    board = pbcopy(f'cat > "{tmp_path}/board"')
    copied("some é")
    assert board.read_text(encoding="utf-8") == "some é"


def test_a_hanging_pbcopy_does_not_block_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **how: object) -> None:
        assert how["timeout"]
        raise subprocess.TimeoutExpired("pbcopy", 5)

    monkeypatch.setattr("tui.actions.clipboard.shutil.which", lambda name: "/bin/pbcopy")
    monkeypatch.setattr("tui.actions.clipboard.subprocess.run", hang)
    assert copied("some") == "some"
