"""Chats are exported with everything, and imported whole or not at all."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.imports import ImportRefused
from mlxserve.history.messages import AnswerStats, ChatRecord, Role, State, StoredMessage
from mlxserve.history.picture import KeptImage
from mlxserve.history.store import Store
from mlxserve.history.transfer import export_chats, import_chats, read_export
from tests.history.exported import PNG, chatgpt, chatgpt_node, open_webui


@pytest.fixture
def other() -> Store:
    return Store.in_memory()


def filled(store: Store) -> None:
    """Write a chat with versions, an image, calls of tools and statistics, and a short one."""
    chat = store.create_chat("A longer chat", "Be brief.")
    question = store.add(chat.id, None, Role.USER, "Why?", images=[KeptImage("a.png", PNG)])
    first = store.add(chat.id, question.id, Role.ASSISTANT, "", state=State.WRITING, model="m")
    call = CallRecord(id="1", name="look", arguments="{}", state=CallState.DONE, result="up")
    store.save(
        replace(
            first,
            text="Because.",
            thinking="Hm.",
            state=State.CUT,
            stats=AnswerStats(prompt_tokens=9, decode_seconds=0.5, miss="new_text"),
            rounds=(ToolRound("Let me look.", "", (call,)),),
        )
    )
    store.add(chat.id, question.id, Role.ASSISTANT, "Another version.", model="n")
    store.show_leaf(chat.id, first.id)
    store.place(chat.id, folder="Work", is_pinned=True)
    store.add(store.create_chat("A short chat").id, None, Role.USER, "Hello")


def content(store: Store) -> list[tuple[ChatRecord, list[StoredMessage]]]:
    """All chats, without what ids they have."""
    chats = []
    for chat in sorted(store.chats(), key=lambda each: each.title):
        messages = store.messages(chat.id)
        places = {message.id: place for place, message in enumerate(messages)}
        alike = [
            replace(each, id=0, chat_id=0, parent_id=places.get(each.parent_id or 0))
            for each in messages
        ]
        chats.append((replace(chat, id=0, leaf_id=places.get(chat.leaf_id or 0)), alike))
    return chats


def test_an_export_is_imported_as_it_was(store: Store, other: Store, tmp_path: Path) -> None:
    filled(store)
    other.add(other.create_chat("Mine").id, None, Role.USER, "Mine")  # so that ids differ
    file = tmp_path / "chats.json"
    assert export_chats(store, file) == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert import_chats(other, read_export(file)).describe() == "2 chats imported"
    imported = [each for each in content(other) if each[0].title != "Mine"]
    assert imported == content(store)
    assert [hit.chat.title for hit in other.search("version")] == ["A longer chat"]


def test_a_chat_that_is_there_is_left_as_it_is(store: Store, tmp_path: Path) -> None:
    filled(store)
    export_chats(store, tmp_path / "chats.json")
    before = content(store)
    report = import_chats(store, read_export(tmp_path / "chats.json"))
    assert report.describe() == "0 chats imported; 2 were here already"
    assert content(store) == before


def test_saved_prompts_are_exported_and_imported(
    store: Store, other: Store, tmp_path: Path
) -> None:
    filled(store)
    store.prompts.save("Pirate", "Talk like\na pirate – „so“.", {"temperature": 0.5, "seed": 7})
    store.prompts.save("Coder", "", {"effort": "low"})
    other.prompts.save("Coder", "My own one.", {})
    export_chats(store, tmp_path / "chats.json")
    content = read_export(tmp_path / "chats.json")
    assert import_chats(other, content).describe() == "2 chats imported; 2 saved prompts imported"
    prompts = {each.name: (each.system, each.sampling) for each in other.prompts.all()}
    assert prompts == {
        "Pirate": ("Talk like\na pirate – „so“.", {"temperature": 0.5, "seed": 7}),
        "Coder": ("My own one.", {}),
        "Coder (2)": ("", {"effort": "low"}),
    }
    again = import_chats(other, content).describe()
    assert again == "0 chats imported; 2 were here already"
    assert len(other.prompts.all()) == 3


def test_prompts_without_a_chat_are_exported_and_imported(
    store: Store, other: Store, tmp_path: Path
) -> None:
    store.prompts.save("x" * 60, "One", {})
    other.prompts.save("x" * 60, "Two", {})
    assert export_chats(store, tmp_path / "chats.json") == 0
    report = import_chats(other, read_export(tmp_path / "chats.json"))
    assert report.describe() == "0 chats imported; 1 saved prompt imported"
    assert [each.name for each in other.prompts.all()] == ["x" * 56 + " (2)", "x" * 60]


@pytest.mark.parametrize(
    "prompt",
    [
        *(7, None, [], {}, {"name": " "}, {"name": 3}, {"name": "a", "system": 3}),
        {"name": "a", "sampling": [1]},
        {"name": "a", "sampling": {"temperature": "hot"}},
        {"name": "a", "sampling": {"top_k": 2**70}},
        {"name": "a", "sampling": {"seed": True}},
        {"name": "a", "sampling": {"temperature": float("inf")}},
        {"name": "a", "sampling": {"unknown": 1}},
        {"name": "a", "sampling": {"effort": "x" * 999}},
        {"name": "a", "system": "x" * 300_000},
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_are_imported(store: Store, prompt: Any) -> None:
    good = {"name": "Good", "system": "Be\ud800 good."}
    report = import_chats(store, {"chats": [chatgpt()], "prompts": [prompt, good]})
    assert (report.num_imported, report.num_prompts, report.num_refused) == (1, 1, 1)
    assert len(report.problems) == 1
    assert [each.system for each in store.prompts.all()] == ["Be\ufffd good."]


def test_no_more_prompts_are_imported_than_may_be_saved(store: Store) -> None:
    prompts = [{"name": f"{number}"} for number in range(101)]
    report = import_chats(store, {"chats": [], "prompts": prompts})
    assert (report.num_prompts, report.num_refused) == (100, 1)
    assert "Delete one of them first" in report.problems[0]


def test_an_export_replaces_no_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text("mine")
    with pytest.raises(FileExistsError):
        export_chats(store, tmp_path / "chats.json")
    assert (tmp_path / "chats.json").read_text() == "mine"


def test_a_bad_chat_is_named_and_the_others_are_imported(store: Store) -> None:
    bad = {**chatgpt(), "title": "Bad", "mapping": {"a": 7}}
    report = import_chats(store, [chatgpt(), bad, open_webui()])
    assert report.describe() == "2 chats imported; 1 could not be read"
    [problem] = report.problems
    assert problem.startswith("'Bad' has a wrong value in 'mapping'")
    assert {chat.title for chat in store.chats()} == {"Blue sky", "A picture"}


def test_what_is_left_out_is_counted(store: Store) -> None:
    question = chatgpt_node("a2", None, "user", "Look", {"content_type": "image_asset_pointer"})
    assert import_chats(store, [chatgpt(question)]).describe() == (
        "1 chat imported; left out: images (1)"
    )


def test_a_disk_that_fills_up_keeps_what_was_there_and_no_half_chat(tmp_path: Path) -> None:
    large = chatgpt(*(chatgpt_node(str(n), None, "user", "x" * 9_999) for n in range(200)))
    store = Store.open(tmp_path / "chat.sqlite", max_bytes=512 << 10)
    store.add(store.create_chat("Mine").id, None, Role.USER, "Mine")
    report = import_chats(store, [large, chatgpt()])
    assert report.num_imported == 0
    assert "Free some disk space" in report.problems[0]
    assert [chat.title for chat in store.chats()] == ["Mine"]
    store.close()


ANYTHING: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2**70,
        1e308,
        1e12,
        "",
        "x",
        "\ud800",
        "user",
        "data:image/png;base64,AA==",
    ),
    *([], {}, [[]], {"a": 1}, ["x"]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))


def test_whatever_is_wrong_a_chat_is_refused_or_can_be_read(store: Store, tmp_path: Path) -> None:
    filled(store)
    export_chats(store, tmp_path / "chats.json")
    whole = [chatgpt(), open_webui(), read_export(tmp_path / "chats.json")["chats"][1]]
    random, num_refused = Random(0), 0
    for number in range(400):
        chat = deepcopy(random.choice(whole))
        chat["title"] = str(number)  # another chat than those before
        if "chat" in chat:
            chat["chat"]["title"] = str(number)
        *path, last = random.choice(list(places(chat)))
        at = chat
        for key in path:
            at = at[key]
        at[last] = random.choice(ANYTHING)
        with suppress(ImportRefused):
            num_refused += import_chats(store, [chat]).num_refused
    assert 50 < num_refused < 350
    for record in store.chats(limit=-1):
        path_ids = {message.id for message in store.path(record.leaf_id)}
        assert path_ids <= {message.id for message in store.messages(record.id)}


def written(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "chats.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 1_000_000, "nested too deeply"),
        ('[{"messages": ' + "[" * 200_000 + "]" * 200_000 + "}]", "nested too deeply"),
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("1" * 5_000, "is not JSON"),
        (b"PK\x03\x04...", "is a ZIP archive: unpack it"),
        ("", "is not JSON"),
    ],
)
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, text: Any, words: str) -> None:
    with pytest.raises(ImportRefused, match=words):
        read_export(written(tmp_path, text))


def test_a_file_larger_than_any_export_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    with file.open("wb") as opened:
        opened.truncate(513 << 20)  # a sparse file
    with pytest.raises(ImportRefused, match="is larger than 512 MiB"):
        read_export(file)


def test_chats_read_from_the_api_are_imported_as_well(store: Store) -> None:
    sent = {
        "title": "From the API",
        "leaf_id": 5,
        "created_at": 1.7e9,
        "messages": [{"id": 5, "parent_id": None, "role": "user", "text": "Hi"}],
    }
    assert import_chats(store, json.loads(json.dumps(sent))).num_imported == 1
    assert [message.text for message in store.messages(store.chats()[0].id)] == ["Hi"]
