"""Reads chats that mlxserve, ChatGPT or Open WebUI has exported. Pure: writes nothing.

    {"mlxserve": 1, "chats": [...]}            mlxserve: whole chats, with every version; prompts: `prompts_file`
    {"title": ..., "messages": [...]}          mlxserve: the shown branch of one chat
    [{"title": ..., "mapping": {...}}, ...]    ChatGPT's conversations.json
    [{"title": ..., "chat": {...}}, ...]       Open WebUI

A file may be of anybody: every value's type is checked, trees are walked without recursion, and
messages that are their own ancestors are refused.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, TypeVar

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.folders import BadFolderName, folder_name
from mlxserve.history.messages import AnswerStats, ChatRecord, Role, State, StoredMessage
from mlxserve.history.picture import MAX_DOCUMENT, KeptImage
from mlxserve.system.well_formed import well_formed

T = TypeVar("T")

MAX_FILE = 512 << 20  # bytes; the parsed values take several times as much memory
OWN_FORMAT = "mlxserve"  # member of our own exports, beside the chats
_DATA_URL = re.compile(
    r"data:(?:image/(?:png|jpeg|webp|gif)|text/plain);base64,[A-Za-z0-9+/]++={0,2}+"
)
# Open WebUI writes the thinking into the text, as HTML.
_THINKING = re.compile(
    r'<details type="reasoning"[^>]*+>\s*+(?:<summary>[^<]*+</summary>)?(.*?)</details>\s*+', re.S
)
_MAX_SECONDS = 1e11  # of a time; larger numbers are milliseconds
# What is left out.
_IMAGES, _OUTPUTS, _FILES = "images", "calls of tools", "files"
_FOLDERS = "names of folders"


class ImportRefused(ValueError):
    """The file or a chat cannot be imported; the message is the end of a sentence about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedChat:
    """A chat as it was exported.

    chat: its leaf is one of the ids below
    messages: with the ids 1, 2, ..., parents before their children
    left_out: what cannot be kept, by its kind
    """

    chat: ChatRecord
    messages: tuple[StoredMessage, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Node:
    """A message of the exported tree, by its key; None for one that is not shown."""

    parent: object
    message: StoredMessage | None
    thinking: str = ""  # for the answer below a node that is not shown


def chats_in(content: Any) -> list[Any]:
    """Return the chats in a parsed file, each for `read_chat`. Raises ImportRefused."""
    if isinstance(content, dict) and isinstance(content.get("chats"), list):
        chats = content["chats"]
    else:
        chats = content if isinstance(content, list) else [content]
    if not any(_is_chat(chat) for chat in chats):
        raise ImportRefused(
            "contains no chats. Give an export of mlxserve or Open WebUI, or the conversations.json "
            "of ChatGPT's export"
        )
    return list(chats)


def read_chat(content: Any) -> ImportedChat:
    """Read one chat. Raises ImportRefused."""
    chat = _expect(content, dict, "the chat")
    if "mapping" in chat:
        return _chatgpt(chat)
    if isinstance(chat.get("chat"), dict):
        return _open_webui({**chat, **chat["chat"]})
    if "history" in chat:
        return _open_webui(chat)
    if "leaf_id" in chat:
        return _own(chat)
    return _request(chat)


def title_in(content: Any) -> str:
    """Return the title of a chat that may be anything, for messages about it."""
    title = content.get("title") if isinstance(content, dict) else None
    return title if isinstance(title, str) and title else "A chat"


def _is_chat(value: Any) -> bool:
    names = ("mapping", "chat", "history", "messages")
    return isinstance(value, dict) and any(name in value for name in names)


# ---- ChatGPT


def _chatgpt(chat: Mapping[str, Any]) -> ImportedChat:
    left_out: Counter[str] = Counter()
    nodes: dict[object, _Node] = {}
    system = ""
    for key, value in _expect(chat["mapping"], dict, "mapping").items():
        node = _expect(value, dict, "mapping")
        message = _object(node.get("message"), "message")
        role = _object(message.get("author"), "author").get("role")
        text, thinking = _chatgpt_text(message, left_out)
        is_shown = _is_shown(message)
        if role == "system" and is_shown:
            system = system or text
        shown = _chatgpt_message(message, role, text) if is_shown else None
        nodes[key] = _Node(node.get("parent"), shown, thinking)
        left_out[_OUTPUTS] += role == "tool" and bool(text)
    # A project is a folder, of which a chat has only the id.
    left_out[_FOLDERS] += str(chat.get("gizmo_id")).startswith("g-p-")
    is_pinned = chat.get("is_starred") is True or bool(chat.get("pinned_time"))
    return _made(
        chat, nodes, chat.get("current_node"), left_out, system=system, is_pinned=is_pinned
    )


def _chatgpt_text(message: Mapping[str, Any], left_out: Counter[str]) -> tuple[str, str]:
    """Return a message's text and thinking."""
    content = _object(message.get("content"), "content")
    kind = content.get("content_type", "text")
    if kind == "thoughts":
        thoughts = [
            _object(each, "thoughts") for each in _items(content.get("thoughts"), "thoughts")
        ]
        return "", "\n\n".join(_text(each.get("content"), "thoughts") for each in thoughts)
    if kind not in ("text", "multimodal_text"):
        return _text(content.get("text"), "text") if kind == "execution_output" else "", ""
    texts = []
    for part in _items(content.get("parts"), "parts"):
        if isinstance(part, str):
            texts.append(well_formed(part))
        else:
            left_out[_IMAGES] += _object(part, "parts") != {}
    return "\n\n".join(text for text in texts if text.strip()), ""


def _is_shown(message: Mapping[str, Any]) -> bool:
    """False for calls of ChatGPT's tools, and for instructions that it hides."""
    metadata = _object(message.get("metadata"), "metadata")
    is_hidden = metadata.get("is_visually_hidden_from_conversation") is True
    return not is_hidden and message.get("recipient") in (None, "all")


def _chatgpt_message(message: Mapping[str, Any], role: object, text: str) -> StoredMessage | None:
    if role not in tuple(Role) or not text.strip():
        return None
    metadata = _object(message.get("metadata"), "metadata")
    model = _text(metadata.get("model_slug"), "model_slug") if role == Role.ASSISTANT else ""
    return _stored(role, text, model=model, created_at=_time(message.get("create_time")))


# ---- Open WebUI


def _open_webui(chat: Mapping[str, Any]) -> ImportedChat:
    left_out: Counter[str] = Counter()
    history = _object(chat.get("history"), "history")
    nodes: dict[object, _Node] = {}
    for key, value in _object(history.get("messages"), "messages").items():
        message = _expect(value, dict, "messages")
        nodes[key] = _Node(message.get("parentId"), _open_webui_message(message, left_out))
    params = _object(chat.get("params"), "params")
    system = _text(params.get("system") or chat.get("system"), "system")
    left_out[_FOLDERS] += bool(chat.get("folder_id"))  # of the folder it has only the id
    is_pinned = chat.get("pinned") is True
    return _made(
        chat, nodes, history.get("currentId"), left_out, system=system, is_pinned=is_pinned
    )


def _open_webui_message(message: Mapping[str, Any], left_out: Counter[str]) -> StoredMessage | None:
    role = message.get("role")
    text, images = _content(message.get("content"), left_out)
    for each in _items(message.get("files"), "files"):
        file = _object(each, "files")
        images += _image(file.get("url"), file.get("name"), left_out)
    if role not in tuple(Role) or not (text.strip() or images):
        return None
    thinking = ""
    if role == Role.ASSISTANT and text.startswith("<details") and (cut := _THINKING.match(text)):
        thinking, text = cut[1].strip(), text[cut.end() :]
    model = _text(message.get("model"), "model") if role == Role.ASSISTANT else ""
    return _stored(
        role,
        text,
        thinking=thinking,
        model=model,
        images=tuple(images),
        created_at=_time(message.get("timestamp")),
    )


# ---- mlxserve


def _own(chat: Mapping[str, Any]) -> ImportedChat:
    """Read a chat of `mlxserve chats export`, with all versions."""
    nodes: dict[object, _Node] = {}
    left_out: Counter[str] = Counter()
    for value in _items(chat.get("messages"), "messages"):
        message = _expect(value, dict, "messages")
        nodes[_expect(message.get("id"), int, "id")] = _Node(
            message.get("parent_id"), _own_message(message, left_out)
        )
    return _made(chat, nodes, chat.get("leaf_id"), left_out, **_place(chat))


def _place(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a chat of ours stands in the list."""
    is_pinned = chat.get("is_pinned", False)
    if not isinstance(is_pinned, bool):
        raise ImportRefused(f"has a wrong value in 'is_pinned': {str(is_pinned)[:40]!r}")
    try:
        return {"folder": folder_name(_text(chat.get("folder"), "folder")), "is_pinned": is_pinned}
    except BadFolderName as error:
        raise ImportRefused(f"has a wrong value in 'folder': {error}") from error


def _own_message(message: Mapping[str, Any], left_out: Counter[str]) -> StoredMessage:
    images: list[KeptImage] = []
    for each in _items(message.get("images"), "images"):
        image = _object(each, "images")
        images += _image(image.get("url"), image.get("name"), left_out)
    state = _one_of(State, message.get("state", State.DONE), "state")
    texts = {
        name: _text(message.get(name), name) for name in ("text", "thinking", "error", "model")
    }
    return replace(
        _stored(_one_of(Role, message.get("role"), "role"), **texts),
        state=State.STOPPED if state is State.WRITING else state,
        images=tuple(images),
        stats=_stats(_object(message.get("stats"), "stats")),
        rounds=tuple(_round(each) for each in _items(message.get("rounds"), "rounds")),
        created_at=_time(message.get("created_at")),
    )


def _stats(stats: Mapping[str, Any]) -> AnswerStats:
    kept: dict[str, Any] = {}
    for each in fields(AnswerStats):
        value = stats.get(each.name)
        is_text = isinstance(each.default, str)
        kept[each.name] = _text(value, each.name) if is_text else _number(value, each.name)
    return AnswerStats(**kept)


def _round(value: Any) -> ToolRound:
    each = _expect(value, dict, "rounds")
    calls = tuple(_call(call) for call in _items(each.get("calls"), "calls"))
    return ToolRound(
        _text(each.get("text"), "text"), _text(each.get("thinking"), "thinking"), calls
    )


def _call(value: Any) -> CallRecord:
    call = _expect(value, dict, "calls")
    state = _one_of(CallState, call.get("state"), "state")
    images = [_text(url, "images") for url in _items(call.get("images"), "images")]
    return CallRecord(
        **{name: _text(call.get(name), name) for name in ("id", "name", "arguments", "result")},
        state=CallState.STOPPED if state in (CallState.ASKED, CallState.RUNNING) else state,
        seconds=_number(call.get("seconds"), "seconds"),
        images=tuple(url for url in images if _DATA_URL.fullmatch(url)),
    )


def _request(chat: Mapping[str, Any]) -> ImportedChat:
    """Read the messages of a request, which are one branch."""
    left_out: Counter[str] = Counter()
    nodes: dict[object, _Node] = {}
    rounds: list[ToolRound] = []
    system = ""
    for value in _items(chat.get("messages"), "messages"):
        message = _expect(value, dict, "messages")
        role = message.get("role")
        text, images = _content(message.get("content"), left_out)
        if role == "system":
            system = system or text
        elif role == "tool":
            rounds = _answered(rounds, message.get("tool_call_id"), text)
        elif calls := _items(message.get("tool_calls"), "tool_calls"):
            rounds.append(ToolRound(text, "", tuple(map(_wire_call, calls))))
        else:
            role = _one_of(Role, role, "role")
            if rounds and role is Role.USER:
                _append(nodes, replace(_stored(Role.ASSISTANT, ""), rounds=tuple(rounds)))
            kept = tuple(rounds) if role is Role.ASSISTANT else ()
            _append(nodes, replace(_stored(role, text, images=tuple(images)), rounds=kept))
            rounds = []
    if rounds:
        _append(nodes, replace(_stored(Role.ASSISTANT, ""), rounds=tuple(rounds)))
    return _made(chat, nodes, len(nodes), left_out, system=system, **_place(chat))


def _append(nodes: dict[object, _Node], message: StoredMessage) -> None:
    nodes[len(nodes) + 1] = _Node(len(nodes) or None, message)


def _wire_call(value: Any) -> CallRecord:
    call = _expect(value, dict, "tool_calls")
    function = _object(call.get("function"), "function")
    return CallRecord(
        id=_text(call.get("id"), "id"),
        name=_text(function.get("name"), "name"),
        arguments=_text(function.get("arguments"), "arguments"),
        state=CallState.STOPPED,
    )


def _answered(rounds: Sequence[ToolRound], call_id: object, text: str) -> list[ToolRound]:
    """Put a tool's result beside its call in the last round."""
    if not rounds:
        raise ImportRefused("has a tool's result without a call")
    calls = tuple(
        replace(call, result=text, state=CallState.DONE) if call.id == call_id else call
        for call in rounds[-1].calls
    )
    return [*rounds[:-1], replace(rounds[-1], calls=calls)]


# ---- trees


def _made(
    chat: Mapping[str, Any],
    nodes: Mapping[object, _Node],
    leaf: object,
    left_out: Counter[str],
    *,
    system: str = "",
    folder: str = "",
    is_pinned: bool = False,
) -> ImportedChat:
    """Make the chat of a tree. Nodes that are not shown leave their children to their parents."""
    messages: list[StoredMessage] = []
    shown: dict[object, int | None] = {}  # the last shown message down to each node
    thoughts: dict[object, str] = {}
    for key, parent in _parents_first(nodes):
        node, above = nodes[key], shown.get(parent)
        thinking = "\n\n".join(filter(None, (thoughts.get(parent, ""), node.thinking)))
        if node.message is None:
            shown[key], thoughts[key] = above, thinking
            continue
        message = replace(node.message, id=len(messages) + 1, parent_id=above)
        if message.role is Role.ASSISTANT and thinking:
            message = replace(message, thinking=thinking)
        messages.append(message)
        shown[key] = message.id
    if not messages:
        raise ImportRefused("has no messages")
    begun = _begun(chat) or min(
        (each.created_at for each in messages if each.created_at), default=0.0
    )
    last = shown.get(_key(leaf)) or messages[-1].id
    begun = begun or time.time()
    messages = [replace(each, created_at=each.created_at or begun) for each in messages]
    changed = _time(chat.get("updated_at", chat.get("update_time")))
    record = ChatRecord(
        id=0,
        title=_text(chat.get("title"), "title"),
        folder=folder,
        is_pinned=is_pinned,
        created_at=begun,
        updated_at=changed or max(each.created_at for each in messages),
        leaf_id=last,
        system=system or _text(chat.get("system"), "system"),
    )
    return ImportedChat(
        chat=record, messages=tuple(messages), left_out={k: n for k, n in left_out.items() if n}
    )


def _parents_first(nodes: Mapping[object, _Node]) -> Iterable[tuple[object, object]]:
    """Yield each node's key and its parent's. Raises ImportRefused for a circle."""
    children: dict[object, list[object]] = {}
    for key, node in nodes.items():
        parent = _key(node.parent)
        children.setdefault(parent if parent in nodes else None, []).append(key)
    waiting: list[tuple[object, object]] = [(key, None) for key in children.get(None, [])[::-1]]
    num_seen = 0
    while waiting:
        key, parent = waiting.pop()
        num_seen += 1
        yield key, parent
        waiting += [(child, key) for child in reversed(children.get(key, []))]
    if num_seen < len(nodes):
        raise ImportRefused("has messages that are their own ancestors")


def _key(value: object) -> object:
    """Return what may be the key of a node; None for anything else."""
    return value if isinstance(value, (str, int)) else None


def _begun(chat: Mapping[str, Any]) -> float:
    """Return when a chat began; 0 if that is unknown."""
    at = chat.get("created_at", chat.get("create_time"))
    if not isinstance(at, str):
        return _time(at)
    try:
        return _time(datetime.fromisoformat(at).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise ImportRefused("has a created_at that is no time") from error


# ---- values


def _stored(role: Any, text: str, **members: Any) -> StoredMessage:
    return StoredMessage(id=0, chat_id=0, parent_id=None, role=Role(role), text=text, **members)


def _content(value: Any, left_out: Counter[str]) -> tuple[str, list[KeptImage]]:
    """Read the content of a message: a text, or parts with texts, images and documents."""
    if not isinstance(value, list):
        return _text(value, "content"), []
    texts: list[str] = []
    images: list[KeptImage] = []
    for each in value:
        part = _expect(each, dict, "content")
        if part.get("type") == "text":
            texts.append(_text(part.get("text"), "text"))
            continue
        file, image = _object(part.get("file"), "file"), part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        images += _image(url or file.get("file_data"), file.get("filename"), left_out)
    return "\n\n".join(text for text in texts if text), images


def _image(url: object, name: object, left_out: Counter[str]) -> list[KeptImage]:
    """Return an image or a document that can be kept; none for one that can not."""
    if not isinstance(url, str) or len(url) > MAX_DOCUMENT or not _DATA_URL.fullmatch(url):
        is_image = isinstance(url, str) and url.startswith("data:image/")
        left_out[_IMAGES if is_image else _FILES] += 1
        return []
    return [KeptImage(_text(name, "name") or "image", url)]


def _expect(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ImportRefused(f"has a wrong value in {where!r}: {str(value)[:40]!r}")
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    return {} if value is None else _expect(value, dict, where)


def _items(value: Any, where: str) -> list[Any]:
    return [] if value is None else _expect(value, list, where)


def _text(value: Any, where: str) -> str:
    return "" if value is None else well_formed(_expect(value, str, where))


def _one_of(kind: type[T], value: Any, where: str) -> T:
    try:
        return kind(value)  # type: ignore[call-arg]
    except (ValueError, TypeError) as error:
        raise ImportRefused(f"has a wrong value in {where!r}: {str(value)[:40]!r}") from error


def _number(value: Any, where: str) -> Any:
    """Return a number that SQLite can keep, or None."""
    if value is None:
        return None
    if isinstance(value, float) and math.isfinite(value):
        return value
    if abs(number := _expect(value, int, where)) >= 1 << 63:
        raise ImportRefused(f"has too large a number in {where!r}")
    return number


def _time(value: Any) -> float:
    """Return seconds since 1970; 0 for none. Milliseconds are accepted as well."""
    number = _number(value, "a time")
    seconds = float(number or 0)
    seconds = seconds / 1_000 if seconds > _MAX_SECONDS else seconds
    return seconds if 0 < seconds <= _MAX_SECONDS else 0.0
