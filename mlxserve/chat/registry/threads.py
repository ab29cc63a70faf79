"""Runs work on threads of its own, such as loading a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` on a new thread, which continues if this is cancelled.

    It is not one of the loop's executor, whose threads are joined at the end.
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
