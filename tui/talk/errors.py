"""How talking to a server can fail. Data only."""

from __future__ import annotations


class ChatError(Exception):
    """Something the reader has to know: one sentence on what happened, one on what to do."""


class Unreachable(ChatError):
    """No server answers at the address."""


class NotReady(ChatError):
    """The server is there and cannot answer yet: it is loading a model."""


class NoEngine(ChatError):
    """The server does not show its engine: it is not one of ours."""
