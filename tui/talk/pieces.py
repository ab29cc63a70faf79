"""The pieces of a streamed answer. Data only."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the answer. `reason` is the API's (stop, length, tool_calls, ...) or repetition."""

    reason: str


Piece = Began | TextPiece | ThinkingPiece | ToolPiece | UsagePiece | Finish
