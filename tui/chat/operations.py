"""Operations: runs one operation on the open chat at a time.

An operation asks and answers, opens another chat or shows another branch. A new operation stops the
running answer, or leaves it to the server that writes it, and then waits for the operation before it, so
none sees a half-changed chat.
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
        self._leaves = False  # the operation that begins next leaves a running answer
        self.answer: LiveAnswer | None = None  # the one that is being streamed

    @property
    def is_idle(self) -> bool:
        return self._count == 0

    def begin(
        self, operation: Operation, after: Callable[[], None], *, leaves: bool = False
    ) -> None:
        """Stop the running answer, or leave it, and queue this operation; call `after` at its end."""
        self._leaves = leaves
        if self.answer is not None:
            self._end(self.answer)
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
            self._end(answer)
        try:
            return await answer.run()
        finally:
            self.answer = None

    async def finish(self) -> None:
        """End the answer here and wait for every operation to end."""
        if self.answer is not None:
            self.answer.leave()
        async with self._lock:
            return

    def _end(self, answer: LiveAnswer) -> None:
        if self._leaves:
            answer.leave()
        else:
            answer.stop()

    async def _execute(self, operation: Operation, after: Callable[[], None]) -> None:
        try:
            async with self._lock:
                await operation()
        finally:
            self._count -= 1
        after()
