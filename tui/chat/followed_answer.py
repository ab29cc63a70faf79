"""FollowedAnswer: an answer that the server writes and keeps; its events become the pieces of a stream.

Events may repeat what is shown here already, after a reconnect or when an answer is continued. The text
only grows, so what the server has beyond what is shown is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from mlxserve.history.calls import CallsPiece, ToolRound, round_of
from mlxserve.history.messages import State, StoredMessage
from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed
from tui.chat.live_answer import LiveAnswer
from tui.talk.errors import ChatError, ContextFull
from tui.talk.pieces import (
    Began,
    ChatEvent,
    Finish,
    Piece,
    TextPiece,
    ThinkingPiece,
    UsagePiece,
)

_REASONS = {State.DONE: "stop", State.CUT: "length", State.REPEATED: "repetition"}
_FULL = "context_length_exceeded"  # code of the server's error


class AnswerEvents:
    """Turns the events of one answer into pieces, beginning with what is shown of it."""

    def __init__(self, shown: StoredMessage) -> None:
        self.id = shown.id
        self.is_over = False
        self._request_id: str | None = None
        self._text, self._thinking = shown.text, shown.thinking
        self._rounds = list(shown.rounds)
        # What the server has sent.
        self._sent = ToolRound("", "", ())
        self._sent_rounds: list[ToolRound] = []

    def take(self, event: ChatEvent) -> list[Piece | CallsPiece]:
        """Return what is new. Raises ChatError and CancelledError, as reading a stream does."""
        data = event.data
        match event.name:
            case "state":
                return self._state(data.get("answer"))
            case "text":
                self._sent = replace(self._sent, text=self._sent.text + _text_of(data))
            case "thinking":
                self._sent = replace(self._sent, thinking=self._sent.thinking + _text_of(data))
            case "round":
                self._take_round(int(data["index"]), round_of(data["round"]))
            case "request":
                return self._begun(data)
            case "end":
                return self._end(data)
        return self._new()

    def _state(self, answer: Mapping[str, Any] | None) -> list[Piece | CallsPiece]:
        """Take the answer as it is now; it may have ended while nobody listened."""
        if answer is None or answer["id"] != self.id:
            self.is_over = True
            return []
        self._sent_rounds = list(map(round_of, answer["rounds"]))
        thinking = well_formed(answer["thinking"])
        self._sent = ToolRound(well_formed(answer["text"]), thinking, ())
        return [*self._begun(answer), *self._new()]

    def _begun(self, data: Mapping[str, Any]) -> list[Piece | CallsPiece]:
        self._request_id = one_line(str(data["request_id"]), 100) or None
        return [Began(self._request_id)]

    def _take_round(self, index: int, taken: ToolRound) -> None:
        if index == len(self._sent_rounds):  # the text went to the round
            self._sent_rounds.append(taken)
            self._sent = ToolRound("", "", ())
        else:
            self._sent_rounds[index] = taken

    def _new(self) -> list[Piece | CallsPiece]:
        """Return what the server has sent beyond what is shown."""
        pieces: list[Piece | CallsPiece] = []
        last = len(self._rounds) - 1
        for at, sent in enumerate(self._sent_rounds):
            if at > last:
                pieces += self._grown(sent)
                pieces.append(CallsPiece(sent.calls, is_new=True))
                self._rounds.append(sent)
                self._text = self._thinking = ""
            elif at == last and self._rounds[at].calls != sent.calls:
                pieces.append(CallsPiece(sent.calls))
                self._rounds[at] = sent
        if len(self._sent_rounds) == len(self._rounds):
            pieces += self._grown(self._sent)
        return pieces

    def _grown(self, sent: ToolRound) -> list[Piece | CallsPiece]:
        pieces: list[Piece | CallsPiece] = []
        if thinking := sent.thinking[len(self._thinking) :]:
            pieces.append(ThinkingPiece(thinking))
            self._thinking += thinking
        if text := sent.text[len(self._text) :]:
            pieces.append(TextPiece(text))
            self._text += text
        return pieces

    def _end(self, data: Mapping[str, Any]) -> list[Piece | CallsPiece]:
        self.is_over = True
        state, error = State(data["state"]), one_line(str(data["error"]), 300)
        if state is State.FAILED:
            if data.get("code") == _FULL:
                raise ContextFull(f"This chat does not fit into the model's context: {error}")
            raise ChatError(error)
        if state is State.STOPPED:
            raise asyncio.CancelledError
        stats = data["stats"]
        usage = UsagePiece(
            prompt_tokens=stats["prompt_tokens"],
            completion_tokens=stats["completion_tokens"],
            cached_tokens=stats["cached_tokens"],
            accepted_tokens=stats["accepted_tokens"],
            page_size=stats.get("page_size"),
        )
        cuts = one_line(str(data["cuts"]), 300)
        return [Began(self._request_id, cuts), usage, Finish(_REASONS[state])]


class EventQueue:
    """The events of one answer, from whoever reads those of its chat."""

    def __init__(self, shown: StoredMessage) -> None:
        self._events = AnswerEvents(shown)
        self._waiting: asyncio.Queue[ChatEvent | ChatError] = asyncio.Queue()

    @property
    def id(self) -> int:
        """The id of the answer."""
        return self._events.id

    def put(self, event: ChatEvent) -> None:
        self._waiting.put_nowait(event)

    def fail(self, error: ChatError) -> None:
        """End the stream of pieces: no more events will come."""
        self._waiting.put_nowait(error)

    async def pieces(self) -> AsyncGenerator[Piece | CallsPiece, None]:
        """Stream the answer to its end. Raises ChatError."""
        while not self._events.is_over:
            event = await self._waiting.get()
            if isinstance(event, ChatError):
                raise event
            for piece in self._events.take(event):
                yield piece


class FollowedAnswer(LiveAnswer):
    """Ends as the server stored it. The server saves it, and stops it where a user asks for that."""

    def __init__(
        self,
        message: StoredMessage,
        queue: EventQueue,
        *,
        stop: Callable[[], None],
        read_stored: Callable[[int], Awaitable[StoredMessage]],
    ) -> None:
        """Follow the answer `message`, whose events are in the queue.

        stop: asks the server to stop the answer
        read_stored: reads a message from the store
        """
        super().__init__(message, queue.pieces(), _saved_elsewhere)
        self._ask_to_stop = stop
        self._read_stored = read_stored

    def stop(self) -> None:
        """Have the server stop it; it ends once the server says so."""
        self._ask_to_stop()

    def leave(self) -> None:
        """Follow it no longer; the server goes on with it."""
        self.is_left = True
        super().stop()

    async def run(self) -> StoredMessage:
        live = await super().run()
        if self.is_left:
            return live
        stored = await self._read_stored(live.id)
        if stored.state is State.WRITING or (live.state is State.FAILED and self.failure):
            # The server has not stored its end, or the connection to it is lost.
            return replace(stored, state=live.state, error=live.error)
        return stored


async def _saved_elsewhere(_: StoredMessage) -> None:
    """The server saves the answer."""


def _text_of(data: Mapping[str, Any]) -> str:
    return well_formed(str(data["text"]))
