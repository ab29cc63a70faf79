"""Chats of other programs are read whole, and a hostile file is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from mlxserve.history.imports import ImportedChat, ImportRefused, chats_in, read_chat
from mlxserve.history.messages import Role
from tests.history.exported import PNG, chatgpt, chatgpt_node, open_webui


def tree(chat: ImportedChat) -> list[tuple[int | None, str, str]]:
    return [(each.parent_id, each.role, each.text) for each in chat.messages]


def test_a_chat_of_chatgpt_keeps_versions_thinking_models_and_times() -> None:
    read = read_chat(chatgpt())
    assert tree(read) == [
        (None, "user", "Why is the sky blue?"),
        (1, "assistant", "Because of air."),
        (1, "assistant", "Rayleigh."),
    ]
    assert [each.thinking for each in read.messages] == ["", "Air.", ""]
    assert read.messages[1].model == "gpt-5"
    assert read.chat.leaf_id == 3
    assert (read.chat.created_at, read.chat.updated_at) == (1_700_000_000.5, 1_700_000_100.0)


def test_what_chatgpt_hides_leaves_its_children_to_its_parent() -> None:
    read = read_chat(
        chatgpt(
            chatgpt_node("s", None, "system", "Be kind."),
            chatgpt_node("q", "s", "user", "Plot it."),
            chatgpt_node("c", "q", "assistant", "plot()", recipient="python"),
            chatgpt_node("r", "c", "tool", "done"),
            chatgpt_node(
                "h", "r", "user", "x", metadata={"is_visually_hidden_from_conversation": True}
            ),
            chatgpt_node("a2", "h", "assistant", "Here.", {"content_type": "image_asset_pointer"}),
        )
    )
    assert tree(read) == [(None, "user", "Plot it."), (1, "assistant", "Here.")]
    assert read.chat.system == "Be kind."
    assert read.left_out == {"calls of tools": 1, "images": 1}


def test_a_chat_of_open_webui_keeps_images_thinking_and_its_system_prompt() -> None:
    read = read_chat(open_webui())
    assert tree(read) == [(None, "user", "What is this?"), (1, "assistant", "A picture.")]
    assert [(image.name, image.url) for image in read.messages[0].images] == [("a.png", PNG)]
    assert read.messages[1].thinking == "> Hm."
    assert read.messages[1].model == "llama3.2"
    assert read.chat.system == "Be brief."


@pytest.mark.parametrize(
    ("chat", "is_pinned"),
    [
        ({**chatgpt(), "is_starred": True}, True),
        ({**chatgpt(), "pinned_time": 1_700_000_000.0}, True),
        ({**chatgpt(), "is_starred": None, "pinned_time": None}, False),
        ({**open_webui(), "pinned": True}, True),
        ({**open_webui(), "pinned": None}, False),
    ],
)
def test_pins_of_other_programs_are_kept(chat: Any, is_pinned: bool) -> None:
    read = read_chat(chat)
    assert (read.chat.is_pinned, read.chat.folder) == (is_pinned, "")
    assert read.left_out == {}


@pytest.mark.parametrize(
    "chat",
    [
        {**chatgpt(), "gizmo_id": "g-p-67d8"},
        {**open_webui(), "folder_id": "5f3c0a3e-0000-4000-8000-000000000000"},
    ],
)
def test_a_folder_of_which_only_an_id_is_exported_is_left_out_and_counted(chat: Any) -> None:
    read = read_chat(chat)
    assert read.chat.folder == ""
    assert read.left_out == {"names of folders": 1}


def test_one_branch_of_ours_keeps_its_folder_and_pin() -> None:
    chat = {"title": "t", "folder": " Work", "is_pinned": True}
    read = read_chat({**chat, "messages": [{"role": "user", "content": "?"}]})
    assert (read.chat.folder, read.chat.is_pinned) == ("Work", True)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"folder": 7}, "'folder': '7'"),
        ({"folder": "x" * 61}, "'folder': a folder's name may have 60 characters, not 61"),
        ({"folder": "a\x1bb"}, "control characters"),
        ({"is_pinned": "yes"}, "'is_pinned': 'yes'"),
    ],
)
def test_a_bad_folder_or_pin_is_refused(members: dict[str, Any], words: str) -> None:
    messages = [{"id": 1, "role": "user", "text": "?"}]
    with pytest.raises(ImportRefused, match=words):
        read_chat({"title": "t", "leaf_id": 1, "messages": messages, **members})


def test_times_in_milliseconds_are_times() -> None:
    message = {"role": "user", "content": "?", "timestamp": 1_700_000_000_123}
    assert read_chat(open_webui(q=message)).messages[0].created_at == 1_700_000_000.123


def test_the_messages_of_a_request_become_a_branch_with_its_calls() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    read = read_chat(
        {
            "title": "Sum",
            "created_at": "2026-01-02T03:04:05+00:00",
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "assistant", "content": "2."},
            ],
        }
    )
    assert tree(read) == [(None, "user", "1 + 1?"), (1, "assistant", "2.")]
    [[made]] = [each.calls for each in read.messages[1].rounds]
    assert (made.name, made.arguments, made.result) == ("add", '{"a": 1}', "2")
    assert (read.chat.system, read.chat.created_at) == ("Add.", 1_767_323_045.0)


def test_halves_of_emoji_are_replaced() -> None:
    read = read_chat(chatgpt(chatgpt_node("a2", None, "user", "a\ud83d")))
    assert read.messages[0].text == "a\ufffd"


def test_a_branch_of_10_000_messages_is_read_without_recursion() -> None:
    nodes = [chatgpt_node(str(n), str(n - 1) if n else None, "user", "x") for n in range(10_000)]
    read = read_chat(chatgpt(*nodes, current="9999"))
    assert len(read.messages) == read.chat.leaf_id == 10_000


CIRCLE = (chatgpt_node("a", "b", "user", "1"), chatgpt_node("b", "a", "user", "2"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (chatgpt(*CIRCLE), "own ancestors"),
        (chatgpt(chatgpt_node("a", "a", "user", "1")), "own ancestors"),
        (chatgpt(("a", {"message": None})), "no messages"),
        (chatgpt(("a", [])), "wrong value in 'mapping'"),
        ({**chatgpt(), "mapping": []}, "wrong value in 'mapping'"),
        ({**chatgpt(), "title": 7}, "wrong value in 'title'"),
        ({**chatgpt(), "create_time": 10**400}, "too large a number"),
        (chatgpt(chatgpt_node("a", None, "user", ["x"])), "wrong value in 'parts'"),
        (open_webui(a={"role": "user", "content": 7}), "wrong value in 'content'"),
        (open_webui(a={"role": "user", "content": True}), "wrong value in 'content'"),
        (open_webui(a={"role": "user", "content": "x", "files": {}}), "wrong value in 'files'"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "result without a call"),
        ({"messages": [{"role": "robot", "content": "2"}]}, "wrong value in 'role'"),
        ({"messages": {}}, "wrong value in 'messages'"),
        ({"created_at": "soon", "messages": [{"role": "user", "content": "2"}]}, "no time"),
        ({"leaf_id": 1, "messages": [{"id": "1", "role": "user"}]}, "wrong value in 'id'"),
        ({"leaf_id": 1, "messages": [{"id": True, "role": "user"}]}, "wrong value in 'id'"),
        (
            {"leaf_id": 1, "messages": [{"id": 1, "role": "user", "stats": {"miss": 1}}]},
            "wrong value in 'miss'",
        ),
        (
            {
                "leaf_id": 1,
                "messages": [
                    {"id": 1, "role": "user", "rounds": [{"calls": [{"state": ["done"]}]}]}
                ],
            },
            "wrong value in 'state'",
        ),
        ([], "wrong value in 'the chat'"),
        (None, "wrong value in 'the chat'"),
    ],
)
def test_a_hostile_chat_is_refused_by_what_is_wrong(content: Any, words: str) -> None:
    with pytest.raises(ImportRefused, match=words):
        read_chat(content)


@pytest.mark.parametrize("content", [None, 7, "x", [], {}, [[]], {"chats": []}, [{"title": "x"}]])
def test_a_file_without_chats_is_refused(content: Any) -> None:
    with pytest.raises(ImportRefused, match="contains no chats"):
        chats_in(content)


@pytest.mark.parametrize("url", ["https://example.org/a.png", "data:image/svg+xml;base64,AA", 7])
def test_an_image_that_cannot_be_kept_is_counted(url: Any) -> None:
    question = {"role": "user", "content": "?", "files": [{"url": url}]}
    read = read_chat(open_webui(q=question))
    assert read.messages[0].role is Role.USER
    assert sum(read.left_out.values()) == 1
