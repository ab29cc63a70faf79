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


@pytest.fixture
def sorted_chats(home: Path) -> list[int]:
    """Three chats, of which the first is pinned."""
    store = Store.open(home / "chat.sqlite")
    ids = [store.create_chat(title).id for title in ("One", "Two \x1b[31m", "Three")]
    store.place(ids[0], is_pinned=True)
    store.close()
    return ids


def test_chats_are_listed_pinned_and_put_into_a_folder(run: Run, sorted_chats: list[int]) -> None:
    one, two, three = sorted_chats
    lines = run("chats", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == [str(one), str(three), str(two)]
    assert "  pinned  " in lines[0]
    assert "pinned" not in lines[1]
    assert "\x1b" not in lines[2]
    outcome = run("chats", "set", str(two), str(three), "--folder", "Work", "--pin")
    assert "Three: in Work, pinned" in outcome.out
    run("chats", "set", str(one), "--unpin")
    assert run("chats", "list", "--pinned", "--folder", "work").out.count("  Work  ") == 2
    [card] = json.loads(run("chats", "list", "--folder", "", "--json").out)
    assert (card["id"], card["title"], card["folder"], card["is_pinned"]) == (one, "One", "", False)
    run("chats", "set", str(two), str(three), "--folder", "")
    empty = run("chats", "list", "--folder", "Work")
    assert (empty.out, empty.err) == ("", "No such chats.\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1",), "Say what to set: --folder NAME, --pin or --unpin."),
        (("1", "99", "--pin"), "There is no chat 99. `mlxserve chats list` shows the numbers."),
        (("2", "--folder", "x" * 61), "--folder: a folder's name may have 60 characters, not 61."),
        (("2", "--folder", "a\x1bb"), "--folder: a folder's name has no control characters"),
    ],
)
def test_what_cannot_be_set_is_a_line_and_changes_nothing(
    run: Run, sorted_chats: list[int], home: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert sorted_chats == [1, 2, 3]
    assert words in error_line(run("chats", "set", *arguments))
    store = Store.open(home / "chat.sqlite")
    assert [(chat.is_pinned, chat.folder) for chat in store.chats()] == [
        (True, ""),
        (False, ""),
        (False, ""),
    ]
    store.close()
