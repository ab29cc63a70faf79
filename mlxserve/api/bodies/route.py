"""A route together with the model of its body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.request_body import RequestBody


class BodyRoute(Route):
    """A route that needs a JSON body, which the model `body` validates."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        body: type[RequestBody],
        method: str = "POST",
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.body = body
