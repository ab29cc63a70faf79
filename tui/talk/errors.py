"""Errors of talking to a server."""

from __future__ import annotations


class ChatError(Exception):
    """A failure to show to the user: one sentence on what happened, one on what to do."""


class NoReply(ChatError):
    """The server cannot be reached, or the connection to it was lost before its reply."""


class ContextFull(ChatError):
    """The conversation and its answer do not fit into the model's context."""


class ToolsRefused(ChatError):
    """The server refused a request in words about tools, which this model may not be able to call."""


class StaleChat(ChatError):
    """The chat has gone on since it was shown here; nothing was written."""


class ChatBusy(ChatError):
    """The chat is being answered for another client, or what was said came too late."""


class NoChat(ChatError):
    """The server does not have this chat."""


class NoEngine(ChatError):
    """The server does not report its engine: it is not mlxserve."""


class ModelBusy(ChatError):
    """The model answers, and is unloaded by force only."""
