"""What a streaming answer says, piece by piece, and how it can fail. Data only."""

from __future__ import annotations

from dataclasses import dataclass


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
class Usage:
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None  # None: the server does not say


@dataclass(frozen=True, slots=True)
class Finish:
    """The model is done. `reason` is the API's word: stop, length, tool_calls, ..."""

    reason: str


Piece = TextPiece | ThinkingPiece | ToolPiece | Usage | Finish


class ChatError(Exception):
    """Something the reader has to know: one sentence on what happened, one on what to do."""


class Unreachable(ChatError):
    """No server answers at the address."""


class NotReady(ChatError):
    """The server is there and cannot answer yet: it is loading a model."""
