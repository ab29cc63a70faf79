"""LiveAnswer: an answer being streamed; measures it, and saves the text every second.

The screen takes new text when it has time (`take`), so a slow screen never holds up the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from mlxserve.history.calls import CallsPiece, ToolRound
from mlxserve.history.messages import AnswerStats, State, StoredMessage
from mlxserve.history.store import CHECKPOINT_SECONDS
from tui.talk.engine_state import Progress
from tui.talk.errors import ChatError
from tui.talk.pieces import Began, Finish, Piece, TextPiece, ThinkingPiece, ToolPiece, UsagePiece

_ENDS = {"length": State.CUT, "repetition": State.REPEATED}  # states by the reason of `Finish`


class AnswerPhase(Enum):
    WAITING = auto()  # no piece has arrived
    THINKING = auto()
    WRITING = auto()
    CALLING = auto()  # a tool, or waiting for the user's word on it
    ENDED = auto()


@dataclass(slots=True)
class _Tool:
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class NewText:
    """Text that arrived since the last `take`."""

    text: str = ""
    thinking: str = ""


@dataclass(slots=True)
class _GrowingText:
    """A text that grows by pieces, and the number of pieces taken."""

    pieces: list[str] = field(default_factory=list)
    num_taken: int = 0

    def take(self) -> str:
        new = "".join(self.pieces[self.num_taken :])
        self.num_taken = len(self.pieces)
        return new

    def taken(self) -> str:
        return "".join(self.pieces[: self.num_taken])

    def __str__(self) -> str:
        return "".join(self.pieces)


class LiveAnswer:
    """`run` reads it to its end, once; `stop` ends it early and keeps the text so far.

    `leave` stops it as well, unless somebody else writes it.
    """

    def __init__(
        self,
        message: StoredMessage,
        pieces: AsyncGenerator[Piece | CallsPiece, None],
        save: Callable[[StoredMessage], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._message = message
        self._pieces = pieces
        self._save = save
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._num_pieces = 0
        # A continued answer starts with its text so far.
        self._text, self._thinking = _GrowingText([message.text]), _GrowingText([message.thinking])
        self._tools: dict[int, _Tool] = {}
        self._rounds = list(message.rounds)
        self._usage = UsagePiece(None, None, None)
        self._state = State.WRITING
        self._error = ""
        self.failure: ChatError | None = None  # why it failed, if it did
        self._reading: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.is_left = False  # somebody else goes on with it
        self.phase = AnswerPhase.WAITING
        self.request_id: str | None = None  # the server's id, once it has accepted the request
        self.cuts = ""  # which part of its documents the model got, if not all
        self.progress: Progress | None = None  # while waiting, if the server reports it

    @property
    def message(self) -> StoredMessage:
        """The message as it is now."""
        return replace(
            self._message,
            text=str(self._text),
            thinking=str(self._thinking),
            state=self._state,
            error=self._error,
            stats=self.stats,
            rounds=tuple(self._rounds),
        )

    @property
    def stats(self) -> AnswerStats:
        """Statistics: times measured here; the server's token counts, or until then the pieces."""
        return AnswerStats(
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            page_size=self._usage.page_size,
            differs_at=self._usage.differs_at,
            miss=self._usage.miss,
            completion_tokens=self._usage.completion_tokens or self._num_pieces or None,
            accepted_tokens=self._usage.accepted_tokens,
            first_token_seconds=None if self._first is None else self._first - self._started,
            decode_seconds=None
            if self._first is None or self._last is None
            else self._last - self._first,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the request."""
        return self._clock() - self._started

    @property
    def rounds(self) -> Sequence[ToolRound]:
        """The rounds in which tools were called, including the running one."""
        return self._rounds

    @property
    def has_thinking(self) -> bool:
        return any(self._thinking.pieces)

    def take(self) -> NewText:
        """Take the text since the last call."""
        return NewText(self._text.take(), self._thinking.take())

    def taken(self) -> NewText:
        """All text that `take` has returned so far."""
        return NewText(self._text.taken(), self._thinking.taken())

    def stop(self) -> None:
        """End it now, or as soon as `run` starts. Does nothing after the end."""
        self._is_stopped = True
        if self._reading is not None:
            self._reading.cancel()

    def leave(self) -> None:
        """End it here."""
        self.stop()

    async def run(self) -> StoredMessage:
        """Read to the end. A failure becomes part of the returned message."""
        self._reading = asyncio.create_task(self._read(), name="answer")
        if self._is_stopped:
            self._reading.cancel()
        try:
            while not (await asyncio.wait({self._reading}, timeout=CHECKPOINT_SECONDS))[0]:
                await self._save(self.message)
        except asyncio.CancelledError:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            raise
        finally:
            if self._reading.done():
                self._note_end(self._reading)
                await self._save(self.message)
        return self.message

    async def _read(self) -> None:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                self._take_piece(piece)

    def _take_piece(self, piece: Piece | CallsPiece) -> None:
        match piece:
            case CallsPiece():
                self._take_calls(piece)
            case Began(request_id, cuts):
                self.request_id = request_id
                self.cuts = cuts
            case TextPiece(text):
                self._arrived(AnswerPhase.WRITING)
                self._text.pieces.append(text)
            case ThinkingPiece(text):
                self._arrived(AnswerPhase.THINKING)
                self._thinking.pieces.append(text)
            case ToolPiece(index, name, arguments):
                self._arrived(AnswerPhase.WRITING)
                tool = self._tools.setdefault(index, _Tool())
                tool.name += name
                tool.arguments += arguments
            case UsagePiece():
                self._usage = piece
            case Finish(reason):
                self._state = _ENDS.get(reason, State.DONE)
                self._text.pieces.extend(_shown(tool) for tool in self._tools.values())

    def _take_calls(self, piece: CallsPiece) -> None:
        """A new round takes the text so far; after the last call the next round is measured anew."""
        if piece.is_new:
            self._rounds.append(ToolRound(str(self._text), str(self._thinking), piece.calls))
            self._text, self._thinking = _GrowingText(), _GrowingText()
            self._tools.clear()
        else:
            self._rounds[-1] = replace(self._rounds[-1], calls=piece.calls)
        self.phase = AnswerPhase.CALLING
        if not any(call.is_open for call in piece.calls):
            self.phase = AnswerPhase.WAITING
            self._started, self._first, self._last = self._clock(), None, None
            self._num_pieces = 0
            self._usage = replace(self._usage, completion_tokens=None)

    def _arrived(self, phase: AnswerPhase) -> None:
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        self._num_pieces += 1
        self.phase = phase

    def _note_end(self, reading: asyncio.Task[None]) -> None:
        self.phase = AnswerPhase.ENDED
        self._rounds = [each.ended() for each in self._rounds]
        if reading.cancelled():
            self._state = State.STOPPED
            return
        error = reading.exception()
        if isinstance(error, ChatError):
            self._state, self._error, self.failure = State.FAILED, str(error), error
        elif error is not None:
            self._state, self._error = State.FAILED, f"Internal error of the terminal: {error!r}"
            raise error


def _shown(tool: _Tool) -> str:
    """Format a call as Markdown, if the model was offered no tools or was cut off."""
    return f"\n\n```tool_call\n{tool.name}({tool.arguments})\n```\n"
