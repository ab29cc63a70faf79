"""A thread for each model that is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work` on a thread of its own, which goes on if this is cancelled.

    Not in the loop's executor, whose threads are waited for at the end.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised again where it is awaited)
            done.set_exception(error)

    threading.Thread(target=run, name="mlxserve-registry", daemon=True).start()
    return await asyncio.wrap_future(done)
