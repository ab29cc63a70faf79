"""Forms of chats and their messages in replies and events."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlxserve.history.calls import round_fields
from mlxserve.history.messages import ChatRecord, StoredMessage

MAX_IN_EVENT = 64 << 10  # characters of a message in an event


def card_of(chat: ChatRecord) -> dict[str, Any]:
    return {**asdict(chat), "object": "chat"}


def sent_form(message: StoredMessage) -> dict[str, Any]:
    return {**asdict(message), "rounds": list(map(round_fields, message.rounds))}


def event_form(message: StoredMessage) -> dict[str, Any]:
    """Return a message for an event; a large one is only named, to be read with the chat."""
    if message.num_characters > MAX_IN_EVENT:
        return {"id": message.id, "is_left_out": True}
    return sent_form(message)


def end_form(message: StoredMessage, cuts: str, code: str) -> dict[str, Any]:
    """Return how an answer ended, without its text, which followers have.

    cuts: which parts of documents were not read
    code: code of the error with which the server refused the question; empty for any other end
    """
    return {
        "id": message.id,
        "state": message.state,
        "error": message.error,
        "model": message.model,
        "stats": asdict(message.stats),
        "cuts": cuts,
        "code": code,
    }
