"""What an admin may do to the cache while the server runs.

POST /api/v1/cache/reset   forget what is cached; ?force=true even while requests hold pages
POST /api/v1/cache/resize  {"num_pages": N}: memory for the machine, or more of it for the cache
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import require_admin
from mlxserve.api.bodies.request_body import read_request
from mlxserve.api.bodies.route import BodyRoute
from mlxserve.api.errors import ApiError, from_engine, json_response
from mlxserve.api.native.schema import CacheResizeRequest
from mlxserve.api.service import Service
from mlxserve.errors import MlxServeError, QueueFull


class Cache:
    """The endpoints over one `Chat`."""

    def __init__(self, service: Service) -> None:
        self._chat = service.chat
        self._names = service.names
        self._unknown_fields = service.unknown_fields

    def routes(self) -> list[Route]:
        return [
            Route("/api/v1/cache/reset", self.reset, methods=["POST"]),
            BodyRoute("/api/v1/cache/resize", self.resize, body=CacheResizeRequest),
        ]

    async def reset(self, request: Request) -> Response:
        """Forgets every cached page; while requests hold pages only by force."""
        require_admin(request)
        force = request.query_params.get("force", "false")
        if force not in ("true", "false"):
            raise ApiError(
                400, "force: must be true or false.", param="force", code="invalid_value"
            )
        try:
            is_done = await self._chat.reset_prefix_cache(force=force == "true")
        except MlxServeError as error:
            raise from_engine(error) from error
        if not is_done:
            raise ApiError(
                409,
                "Requests hold pages of the cache. Try again when none runs, or with ?force=true, "
                "which makes them compute theirs again.",
                code="busy",
            )
        return json_response({"status": "ok"})

    async def resize(self, request: Request) -> Response:
        """Gives the cache so many pages; answers under way go on."""
        require_admin(request)
        asked = await read_request(CacheResizeRequest, request)
        self._names.check(asked.model)
        try:
            resized = await self._chat.resize_cache(asked.num_pages)
        except QueueFull as error:
            raise ApiError(409, str(error), param="num_pages", code="busy") from error
        except MlxServeError as error:
            raise from_engine(error) from error
        reply = {
            "num_pages": resized.num_pages,
            "max_model_len": resized.max_model_len,
            "moved_pages": resized.num_moved,
            "preempted_requests": resized.num_preempted,
            "forgotten_pages": resized.num_forgotten,
        }
        return json_response(reply, headers=self._unknown_fields.warn(asked.unknown_fields))
