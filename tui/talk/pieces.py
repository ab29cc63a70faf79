"""The pieces of a streamed answer, and the events of a chat. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Began:
    """The server accepted the request; None if it reports no id."""

    request_id: str | None
    cuts: str = ""  # which part of its documents was read, if not all


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """Part of a tool call: the name arrives once, the arguments (JSON) in pieces."""

    index: int
    name: str
    arguments: str
    id: str = ""  # arrives with the name


@dataclass(frozen=True, slots=True)
class UsagePiece:
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None  # None: the server does not report it
    differs_at: int | None = None  # the first token of the prompt that was not cached
    miss: str = ""  # mlxserve's code for why no more was cached
    accepted_tokens: int | None = None  # drafted ones; None: nothing is drafted
    page_size: int | None = None  # tokens of a page of mlxserve's cache


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the answer. `reason` is the API's (stop, length, tool_calls, ...) or repetition."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """Tells what happened in a chat that a server keeps; a follower reconnects after its `id`."""

    name: str
    data: Mapping[str, Any]
    id: str = ""


Piece = Began | TextPiece | ThinkingPiece | ToolPiece | UsagePiece | Finish
