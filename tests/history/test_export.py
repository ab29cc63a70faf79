import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.history.export import Format, as_json, as_markdown, export, file_name, target
from mlxserve.history.messages import ChatRecord, Role, StoredMessage

CHAT = ChatRecord(id=1, title="Why is the sky… blue?", created_at=0.0, updated_at=0.0)
PATH = [
    StoredMessage(id=1, chat_id=1, parent_id=None, role=Role.USER, text="Why?"),
    StoredMessage(
        id=2, chat_id=1, parent_id=1, role=Role.ASSISTANT, text="*Air* scatters é.", model="m"
    ),
]


def test_markdown_reads_as_a_conversation() -> None:
    assert as_markdown(CHAT, PATH) == (
        "# Why is the sky… blue?\n\n## You\n\nWhy?\n\n## m\n\n*Air* scatters é.\n"
    )


def test_json_holds_the_messages_of_a_request() -> None:
    content = json.loads(as_json(CHAT, PATH))
    assert content["title"] == CHAT.title
    assert content["messages"] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "*Air* scatters é."},
    ]


def test_a_system_prompt_comes_first() -> None:
    chat = replace(CHAT, system="Rhyme.")
    assert "## System\n\nRhyme.\n\n## You" in as_markdown(chat, PATH)
    messages = json.loads(as_json(chat, PATH))["messages"]
    assert messages[0] == {"role": "system", "content": "Rhyme."}


def test_a_file_name_is_plain() -> None:
    assert file_name(CHAT, Format.JSON).startswith("why-is-the-sky-blue-")
    assert file_name(CHAT, Format.JSON).endswith(".json")


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    to = tmp_path / "new" / "chat.md"
    export(CHAT, PATH, Format.MARKDOWN, to)
    assert to.read_text(encoding="utf-8") == as_markdown(CHAT, PATH)
    assert stat.S_IMODE(to.stat().st_mode) == 0o600


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    to = tmp_path / "chat.md"
    to.write_text("mine")
    with pytest.raises(FileExistsError):
        export(CHAT, PATH, Format.MARKDOWN, to)
    assert to.read_text() == "mine"


def test_an_argument_names_the_format_the_file_or_both() -> None:
    for argument, kind, to in [
        ("", Format.MARKDOWN, None),
        (" json ", Format.JSON, None),
        ("markdown my notes.txt", Format.MARKDOWN, Path("my notes.txt")),
        ("a b.json", Format.JSON, Path("a b.json")),
        ("~nobody-of-this-name/x.md", Format.MARKDOWN, Path("~nobody-of-this-name/x.md")),
        ("~/x.md", Format.MARKDOWN, Path.home() / "x.md"),
    ]:
        assert target(argument) == (kind, to), argument
