"""`mlxserve chats`: the chats of this user in a file, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from tests.cli.commands import Run, error_line
from tests.history.exported import chatgpt


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def titles(home: Path) -> list[str]:
    store = Store.open(home / "chat.sqlite")
    try:
        return [chat.title for chat in store.chats()]
    finally:
        store.close()


def test_chats_move_to_another_home(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(home / "chat.sqlite")
    store.add(store.create_chat("Why?").id, None, Role.USER, "Why?")
    store.close()
    file = tmp_path / "chats.json"
    assert run("chats", "export", str(file)).out == f"1 chat exported to {file}\n"
    assert "exists. Give the new file another name." in error_line(
        run("chats", "export", str(file))
    )
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "other"))
    assert run("chats", "import", str(file)).out == f"{file}: 1 chat imported\n"
    assert run("chats", "import", str(file)).out.endswith("0 chats imported; 1 were here already\n")
    assert titles(tmp_path / "other") == ["Why?"]


def test_a_bad_chat_is_told_and_the_exit_code_is_1(run: Run, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([chatgpt(), {"title": "\x1b[31mBad", "mapping": 7}]))
    outcome = run("chats", "import", str(file))
    assert outcome.code == 1
    assert "1 chat imported; 1 could not be read" in outcome.out
    assert "has a wrong value in 'mapping'" in outcome.err
    assert "\x1b" not in outcome.err
    assert titles(home) == ["Blue sky"]


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read: No such file"), ("7", "contains no chats"), ("[", "is not JSON")],
)
def test_a_file_that_is_no_export_is_one_line(
    run: Run, home: Path, tmp_path: Path, text: str | None, words: str
) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert words in error_line(run("chats", "import", str(file)))
