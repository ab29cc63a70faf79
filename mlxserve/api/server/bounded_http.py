"""BoundedHttp: HTTP/1.1 on one connection, by h11, with bounds on what a client may send first."""

from __future__ import annotations

from typing import Any

import h11

from mlxserve.api.errors import ApiError

MAX_HEAD = 64 * 1_024  # bytes of a request line and its headers


class BoundedHttp(h11.Connection):
    """Refuses request heads that h11 accepts: oversized ones that arrive whole, and other versions.

    refusal: the reply to a RemoteProtocolError if a 400 does not say enough
    """

    def __init__(self, max_head: int) -> None:
        super().__init__(h11.SERVER, max_head)
        self.refusal: ApiError | None = None
        self._max_head = max_head

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refusal = self._too_large()
            raise
        if isinstance(event, h11.Request):
            self.refusal = self._refusal_of(event)
            if self.refusal is not None:
                raise h11.RemoteProtocolError(self.refusal.message)
        return event

    def _refusal_of(self, head: h11.Request) -> ApiError | None:
        if head.http_version not in (b"1.0", b"1.1"):
            message = "This server speaks HTTP/1.0 and HTTP/1.1."
            return ApiError(505, message, code="http_version_not_supported")
        if len(head.target) > self._max_head:
            message = f"The address in the request is longer than {self._max_head} bytes."
            return ApiError(414, message, code="uri_too_long")
        if sum(len(name) + len(value) for name, value in head.headers) > self._max_head:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        message = f"The request's line and headers are larger than {self._max_head} bytes."
        return ApiError(431, message, code="headers_too_large")
