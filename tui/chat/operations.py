"""Operations: runs one operation on the open chat at a time.

An operation asks and answers, opens another chat or shows another branch. A new operation stops the
running answer and then waits for the operation before it, so none sees a half-changed chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from mlxserve.history.messages import StoredMessage
from tui.chat.live_answer import LiveAnswer

Operation = Callable[[], Awaitable[None]]


class Operations:
    """Runs operations in the order of `begin`."""

    def __init__(self, run: Callable[[Callable[[], Coroutine[Any, Any, None]]], object]) -> None:
        # Starts a coroutine function in the background.
        self._run = run
        self._lock = asyncio.Lock()
        # Running, or waiting for the lock.
        self._count = 0
        self.answer: LiveAnswer | None = None  # the one that is being streamed

    @property
    def is_idle(self) -> bool:
        return self._count == 0

    def begin(self, operation: Operation, after: Callable[[], None]) -> None:
        """Stop the running answer and queue this operation; call `after` at its end."""
        self.stop_answer()
        self._count += 1
        self._run(partial(self._execute, operation, after))

    def stop_answer(self) -> None:
        """Stop the running answer, if there is one; its text so far is kept."""
        if self.answer is not None:
            self.answer.stop()

    async def follow(self, answer: LiveAnswer) -> StoredMessage:
        """Run an answer to its end, inside an operation. A waiting operation stops it at once."""
        self.answer = answer
        if self._count > 1:
            answer.stop()
        try:
            return await answer.run()
        finally:
            self.answer = None

    async def finish(self) -> None:
        """Stop the answer and wait for every operation to end."""
        self.stop_answer()
        async with self._lock:
            return

    async def _execute(self, operation: Operation, after: Callable[[], None]) -> None:
        try:
            async with self._lock:
                await operation()
        finally:
            self._count -= 1
        after()
