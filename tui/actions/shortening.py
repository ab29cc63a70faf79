"""Shortens a chat that no longer fits into the model's context.

full     the server refused the prompt: nothing was answered
         Enter     continue without the oldest messages
         /compact  the same, with a summary of them by the model
nearly   a warning in the status line; /compact works at any time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxserve.history.context import last_to_go
from mlxserve.history.messages import StoredMessage
from tui.actions.server_link import ServerLink
from tui.chat.open_chat import OpenChat
from tui.talk.connection import ServerConnection
from tui.talk.errors import ChatError, ContextFull
from tui.talk.pieces import TextPiece
from tui.widgets.window import ChatWindow

FULL = "Enter: continue without the oldest messages · /compact: let the model summarise them first · Ctrl+N: new chat"
_TOO_LONG = (
    "This message alone does not fit into the model's context. Shorten it with /edit, switch off tools "
    "with /tools, or choose a model with a longer context with /model."
)
_NOTHING = "There is nothing to summarise yet."
_ASK = (
    "Summarise our conversation so far in at most 150 words. Keep names, numbers, decisions and open "
    "questions. Write the summary only."
)
_MAX_SUMMARY = 400  # tokens
_UNKNOWN_CONTEXT = 4096  # tokens, where the server does not report it


@dataclass
class Shortening:
    """Leaves the oldest messages of the open chat out of the prompt."""

    _open_chat: OpenChat
    _link: ServerLink
    _window: ChatWindow

    async def leave_out_oldest(self) -> bool:
        """Free about half of the context. False if nothing can be left out."""
        last = self._last_to_go(self._context // 2)
        if last is None:
            await self._window.transcript.say(_TOO_LONG, is_error=True)
            return False
        await self._open_chat.leave_out(last)
        return True

    async def summarise(self) -> bool:
        """Replace all but the newest messages by a summary. False if that failed."""
        connection = self._link.connection
        last = self._last_to_go(self._context // 8)
        if connection is None or last is None:
            await self._window.transcript.say(_NOTHING, is_error=True)
            return False
        self._window.status.say("Summarising the chat")
        try:
            summary = await self._summary(connection, last)
        except ChatError as error:
            await self._window.transcript.say(
                f"The chat was not summarised: {error}", is_error=True
            )
            return False
        await self._open_chat.leave_out(last, summary)
        return True

    def _last_to_go(self, kept: int) -> StoredMessage | None:
        """Return the answer up to which messages must go to keep at most `kept` tokens."""
        return last_to_go(self._open_chat.path, self._open_chat.left_out, kept)

    @property
    def _context(self) -> int:
        connection = self._link.connection
        context = None if connection is None else connection.context
        return context or _UNKNOWN_CONTEXT

    async def _summary(self, connection: ServerConnection, last: StoredMessage) -> str:
        """Summarise the messages; of a conversation that is too long itself, only the newest part.

        Raises ChatError.
        """
        messages = self._open_chat.wire(last, reads_files=connection.is_ours)
        while True:
            try:
                return await self._asked(connection, [*messages, {"role": "user", "content": _ASK}])
            except ContextFull:
                first = 1 if messages[0]["role"] == "system" else 0
                exchanges = len(messages) // 2
                if exchanges < 2:
                    raise
                del messages[first : first + 2 * (exchanges // 2)]

    async def _asked(self, connection: ServerConnection, messages: list[dict[str, Any]]) -> str:
        summary = ""
        async for piece in connection.client.stream(
            messages,
            model=connection.model,
            stops_loops=connection.is_ours,
            fields={"max_tokens": _MAX_SUMMARY},
        ):
            summary += piece.text if isinstance(piece, TextPiece) else ""
        if not summary.strip():
            raise ChatError("The model wrote nothing.")
        return summary.strip()
