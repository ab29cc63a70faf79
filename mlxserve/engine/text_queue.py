"""TextQueue: work on texts and images between the engine's steps, fairly between clients.

    short texts ── FairOrder ──▶ one under way ─┐
    long texts  ── FairOrder ──▶ one under way ─┴─▶ between two steps, a piece of each in turn

A text under way has its keys and values in memory: there are two at most, and one of them is short.
A short text does not wait for the end of a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from mlxserve.core.errors import EngineStopped
from mlxserve.helpers.fair_executor import FairOrder
from mlxserve.model.dense_text import Result, TextWork

if TYPE_CHECKING:
    from mlxserve.engine.engine import Engine

SHORT_TOKENS = 1024


class QueuedText(Generic[Result]):
    """A client's work on texts, until its `result`.

    It lives on the engine's thread, except for `leave`.
    """

    def __init__(
        self, client: str, num_tokens: int, make: Callable[[Engine], TextWork[Result]]
    ) -> None:
        self.client = client
        self.num_tokens = num_tokens
        self.result: Future[Result] = Future()
        self.has_left = False  # its caller has left
        self.is_done = False
        self._make = make
        self._text: TextWork[Result] | None = None

    def leave(self) -> None:
        """Stop computing it. Callable from any thread."""
        self.has_left = True

    def advance(self, engine: Engine) -> Result | None:
        """Compute one piece; return the result after the last one, else None.

        Raises the errors of the model.
        """
        result = None
        try:
            if not self.has_left:
                self._text = self._text or self._make(engine)
                result = engine.side_work.advance(self._text)
        except BaseException:
            self._end()
            raise
        if result is not None or self.has_left:
            self._end()
        return result

    def _end(self) -> None:
        self.is_done = True
        text, self._text = self._text, None
        if text is not None:
            text.release()


class TextQueue:
    """The queue of the engine's thread. Other threads may call `refuse`."""

    def __init__(self) -> None:
        self._orders = (FairOrder[QueuedText[Any]](), FairOrder[QueuedText[Any]]())  # long, short
        self._under_way: list[QueuedText[Any] | None] = [None, None]
        self._next_kind = 0
        self.unanswered: set[QueuedText[Any]] = set()

    def push(self, text: QueuedText[Any]) -> None:
        self._orders[text.num_tokens <= SHORT_TOKENS].push(text.client, text.num_tokens, text)
        self.unanswered.add(text)

    def next(self) -> QueuedText[Any] | None:
        """The text whose piece is next; None if there is none."""
        for _ in self._orders:
            kind, self._next_kind = self._next_kind, 1 - self._next_kind
            text = self._under_way[kind]
            if text is None or text.is_done:
                text = self._under_way[kind] = self._first(kind)
            if text is not None:
                return text
        return None

    def answer(self, text: QueuedText[Any], result: Any) -> None:
        """Complete a text. A `result` that is an exception is raised where it is awaited."""
        self.unanswered.discard(text)
        # Its caller has left, or the engine has ended.
        with suppress(InvalidStateError):
            if isinstance(result, BaseException):
                text.result.set_exception(result)
            else:
                text.result.set_result(result)

    def refuse(self, reason: EngineStopped) -> None:
        """Refuse all texts after the engine has ended. Callable from any thread."""
        for text in list(self.unanswered):
            self.answer(text, reason)

    def _first(self, kind: int) -> QueuedText[Any] | None:
        """Pop the first waiting text, forgetting those whose callers have left."""
        order = self._orders[kind]
        while order:
            text = order.pop()
            if not text.has_left:
                return text
            order.charge(text.client, -text.num_tokens)
            self.unanswered.discard(text)
        return None
