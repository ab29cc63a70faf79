"""What a streaming answer says, piece by piece, and how it can fail. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Began:
    """The server has taken the request, under this name; None: it says none."""

    request_id: str | None


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ThinkingPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """Part of a tool call: the name comes once, the arguments (JSON) in pieces."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class UsagePiece:
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None  # None: the server does not say
    differs_at: int | None = None  # the first token of the prompt that was not known
    miss: str = ""  # why no more of it was in the cache, in our server's words


@dataclass(frozen=True, slots=True)
class Finish:
    """The model is done. `reason` is the API's word: stop, length, tool_calls, ..."""

    reason: str


Piece = Began | TextPiece | ThinkingPiece | ToolPiece | UsagePiece | Finish
