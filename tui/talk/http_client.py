"""An HTTP client that closes every connection when it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


class ClosingClient(httpx.AsyncClient):
    """httpx's client, but `aclose` ends its requests too.

    httpx forgets a connection that is being opened at that moment, and it stays open for good. A
    request that is sent while the client closes, or afterwards, raises ReadError. Use from one event
    loop only.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sending: set[asyncio.Task[httpx.Response]] = set()
        self._is_closing = False

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        if self._is_closing:
            # httpx raises RuntimeError, which no reader that tries again expects.
            raise httpx.ReadError("The client is closed.", request=request)
        sending = asyncio.create_task(super().send(request, **options), name="send")
        self._sending.add(sending)
        try:
            return await sending
        except asyncio.CancelledError:
            if sending.done() and not sending.cancelled() and sending.exception() is None:
                # It came just before its reader was cancelled.
                await sending.result().aclose()
            reader = asyncio.current_task()
            if not self._is_closing or (reader is not None and reader.cancelling()):
                raise
            message = "The client was closed before the reply came."
            raise httpx.ReadError(message, request=request) from None
        finally:
            self._sending.discard(sending)

    async def aclose(self) -> None:
        self._is_closing = True
        for sending in self._sending:
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await super().aclose()
