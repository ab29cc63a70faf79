"""Traces: the conversations of a chat, by which servers find its cached pages.

A page is identified by all tokens up to its end. So a server that gets a chat's conversations finds
the pages that it computed for them. With them come those of other chats that begin alike, whose
pages are to stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.history.calls import round_messages
from mlxserve.history.context import sent_messages
from mlxserve.history.messages import ChatRecord, Role, StoredMessage, wire_messages
from mlxserve.history.store import Store

MAX_CONVERSATIONS = 200  # newest conversations of one chat

Wire = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Traces:
    """A chat's conversations.

    kept: conversations of other chats that begin alike, and stay; models: that answered
    """

    conversations: list[Wire]
    kept: list[Wire]
    models: list[str]


def traces(store: Store, chat_id: int) -> Traces:
    """Return the traces of a chat that is about to be deleted. Raises StoreError."""
    chat, messages = store.chat(chat_id), store.messages(chat_id)
    conversations: list[Wire] = []
    for conversation in _conversations(chat, messages):
        if conversation and conversation not in conversations:
            conversations.append(conversation)
        if len(conversations) == MAX_CONVERSATIONS:
            break
    kept = list(_kept(store, chat_id, conversations))
    models = dict.fromkeys(message.model for message in messages if message.model)
    return Traces(conversations, kept, list(models))


def _conversations(chat: ChatRecord, messages: Sequence[StoredMessage]) -> Iterator[Wire]:
    """Yield the conversations as they were sent and answered, newest first.

    Each branch is one, and so is each answer that later prompts do not repeat in full.
    """
    by_id = {message.id: message for message in messages}
    inner = {message.parent_id for message in messages}
    for message in reversed(messages):
        if message.id in inner and not (message.thinking or message.rounds):
            continue
        path = [message]
        while (parent := path[0].parent_id) is not None:
            path.insert(0, by_id[parent])
        yield _as_written(path, chat.system)
        if chat.left_out is not None:
            yield sent_messages(path, chat.system, chat.left_out)


def _as_written(path: Sequence[StoredMessage], system: str) -> Wire:
    """Return the messages, the last answer with its thinking."""
    *before, last = path
    if last.role is Role.USER:
        return wire_messages(path, system)
    messages = wire_messages(before, system)
    for tool_round in last.rounds:
        messages += round_messages(tool_round, has_thinking=True)
    if last.text or last.thinking:
        messages.append(
            {"role": "assistant", "content": last.text, "reasoning_content": last.thinking}
        )
    return messages


def _kept(store: Store, chat_id: int, conversations: Sequence[Wire]) -> Iterator[Wire]:
    """For each conversation, yield the other chat's that has most in common with it."""
    beginnings = [
        (chat, wire_messages([question], chat.system))
        for chat, question in store.beginnings(but=chat_id)
    ]
    whole: dict[int, list[Wire]] = {}
    kept: list[Wire] = []
    for conversation in conversations:
        others = [beginning for _, beginning in beginnings]
        for chat, beginning in beginnings:
            if conversation[: len(beginning)] == beginning:
                if chat.id not in whole:
                    whole[chat.id] = list(_conversations(chat, store.messages(chat.id)))
                others += whole[chat.id]
        nearest = max(others, key=lambda other: _num_common(conversation, other), default=None)
        if nearest is not None and nearest not in kept:
            kept.append(nearest)
            yield nearest


def _num_common(first: Wire, other: Wire) -> tuple[int, int]:
    """(messages, characters of the next one) that two conversations share at the start."""
    pairs = list(zip(first, other, strict=False))
    same = next((at for at, (mine, its) in enumerate(pairs) if mine != its), len(pairs))
    if same == len(pairs):
        return same, 0
    mine, its = map(_text, pairs[same])
    ends = min(len(mine), len(its))
    return same, next((at for at in range(ends) if mine[at] != its[at]), ends)


def _text(message: Mapping[str, Any]) -> str:
    return f"{message['role']} {message['content']}"
