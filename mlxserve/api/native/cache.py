"""Changes of the cache while the server runs. They need the scope admin.

POST /api/v1/cache/reset   evict all cached pages; ?force=true even while requests hold pages,
                           ?disk=true also those on disk
POST /api/v1/cache/resize  {"num_pages": N}: give memory back to the machine, or take more of it
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import require_admin
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import ApiError, invalid_value, json_response
from mlxserve.api.native.schema import CacheResizeRequest
from mlxserve.api.service import Service
from mlxserve.core.errors import OutOfMemory, QueueFull


class Cache:
    """The endpoints over one engine."""

    def __init__(self, service: Service) -> None:
        self._engine = service.model.engine

    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/cache/reset", self.reset, methods=["POST"]),
            BodyRoute(
                "/api/v1/cache/resize",
                self.resize,
                body=CacheResizeRequest,
                admit=require_admin,
            ),
        ]

    async def reset(self, request: Request) -> Response:
        """Evicts every cached page; `disk` also those on disk.

        While requests hold pages, only with `force`.
        """
        require_admin(request)
        force, disk = _flag(request, "force"), _flag(request, "disk")
        is_done = await self._engine.reset_prefix_cache(force=force, disk=disk)
        if not is_done:
            raise ApiError(
                409,
                "Running requests hold pages of the cache. Try again when none runs, or use "
                "?force=true, after which they recompute their pages.",
                code="busy",
            )
        return json_response({"status": "ok"})

    async def resize(self, _request: Request, body: CacheResizeRequest) -> Response:
        """Resizes the cache to `num_pages`. Running answers continue."""
        try:
            resized = await self._engine.resize_cache(body.num_pages)
        except QueueFull as error:
            raise ApiError(409, str(error), param="num_pages", code="busy") from error
        except OutOfMemory as error:
            # Not a 503: the request asked for too much, and its message says what is possible.
            raise ApiError(409, str(error), param="num_pages", code="out_of_memory") from error
        reply = {
            "num_pages": resized.num_pages,
            "max_model_len": resized.max_model_len,
            "preempted_requests": resized.num_preempted,
            "forgotten_pages": resized.num_forgotten,
        }
        return json_response(reply)


def _flag(request: Request, name: str) -> bool:
    """Read a query parameter, which is false by default. Raises ApiError 400."""
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise invalid_value(name, "must be true or false")
    return value == "true"
