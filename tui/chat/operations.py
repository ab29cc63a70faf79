"""One change to the conversation at a time.

A turn asks, answers, opens another chat or shows another branch. A new turn stops the answer
under way and then waits for the turn before it, so that no two of them ever see a conversation
that is half changed. Knows nothing of what a turn does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from tui.chat.live_answer import LiveAnswer
from tui.chat.messages import ChatMessage

Operation = Callable[[], Awaitable[None]]


class Operations:
    """Runs turns in the order they were begun."""

    def __init__(self, run: Callable[[Coroutine[None, None, None]], object]) -> None:
        self._run = run  # starts a coroutine in the background
        self._lock = asyncio.Lock()
        self._count = 0  # running, or waiting for the lock
        self.answer: LiveAnswer | None = None  # the one that is coming

    @property
    def is_idle(self) -> bool:
        return self._count == 0

    def begin(self, operation: Operation, after: Callable[[], None]) -> None:
        """Stop what is coming and do this instead; then call `after`."""
        self.stop_answer()
        self._count += 1
        self._run(self._take_turn(operation, after))

    def stop_answer(self) -> None:
        """End the answer under way, if there is one; what has come is kept."""
        if self.answer is not None:
            self.answer.stop()

    async def follow(self, answer: LiveAnswer) -> ChatMessage:
        """Run an answer, inside a turn, to its end; a turn that is waiting already stops it."""
        self.answer = answer
        if self._count > 1:
            answer.stop()
        try:
            return await answer.run()
        finally:
            self.answer = None

    async def finish(self) -> None:
        """Stop the answer and let every turn come to its end."""
        self.stop_answer()
        async with self._lock:
            return

    async def _take_turn(self, operation: Operation, after: Callable[[], None]) -> None:
        try:
            async with self._lock:
                await operation()
        finally:
            self._count -= 1
        after()
