"""Lists the loaded models, and loads, pins and unloads them. All routes need the scope admin.

GET  /api/v1/models          each model with its memory, its requests and the time it has left
POST /api/v1/models/load     {"model": NAME, "keep_alive": "5m"}: load it now; replies when it is loaded
                             {"model": NAME, "pinned": true}: and keep it until it is unpinned or unloaded
POST /api/v1/models/unload   {"model": NAME, "force": true}: write its pages to disk and free its memory
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import require_admin
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.fields import ModelName
from mlxserve.api.bodies.keep_alive import KeepAlive
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.dispatch import ModelDispatch, OfferedModel, not_loaded
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.fair_work import load_fairly
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import MlxServeError


class LoadRequest(RequestBody):
    """The body of `POST /api/v1/models/load`.

    pinned: whether it stays loaded until it is unloaded by its name; null leaves it as it is
    """

    model: ModelName
    keep_alive: KeepAlive = None
    pinned: bool | None = None


class UnloadRequest(RequestBody):
    """The body of `POST /api/v1/models/unload`."""

    model: ModelName
    force: bool = False


class Loading:
    """The endpoints over one registry."""

    def __init__(self, registry: ModelRegistry, dispatch: ModelDispatch) -> None:
        self._registry = registry
        self._dispatch = dispatch

    def routes(self) -> list[Route]:
        own_route = partial(BodyRoute, of_model=False, admit=require_admin)
        return [
            Route("/api/v1/models", self.index, methods=["GET"]),
            own_route("/api/v1/models/load", self.load, body=LoadRequest),
            own_route("/api/v1/models/unload", self.unload, body=UnloadRequest),
        ]

    async def index(self, request: Request) -> Response:
        """Lists what is loaded, its memory and its requests."""
        require_admin(request)
        cards = [self._card(model) for model in self._dispatch.models() if model.adapter is None]
        budget = self._registry.budget
        return json_response({"object": "list", "data": cards, "memory_limit": budget})

    async def load(self, request: Request, body: LoadRequest) -> Response:
        """Loads a model, and changes how long it stays without a request, or pins it."""
        name = self._dispatch.model(body.model).model.name
        try:
            await load_fairly(request, partial(self._load, name, body))
        except MlxServeError as error:
            raise not_loaded(error) from error
        return json_response(self._card(self._dispatch.model(name)))

    async def _load(self, name: str, body: LoadRequest) -> None:
        async with self._registry.use(name):
            self._registry.keep(name, body.keep_alive, is_pinned=body.pinned)

    async def unload(self, _request: Request, body: UnloadRequest) -> Response:
        """Unloads a model; with `force` also while it answers."""
        name = self._dispatch.model(body.model).model.name
        if not await self._registry.unload(name, force=body.force):
            num_requests = self._registry.state(name).num_requests
            raise ApiError(
                409,
                f"{name} is in use by {num_requests} request{'s' * (num_requests > 1)}. Try again "
                'later, or end them with "force": true.',
                param="model",
                code="busy",
            )
        return json_response(self._card(self._dispatch.model(name)))

    def _card(self, offered: OfferedModel) -> dict[str, Any]:
        use = self._registry.state(offered.model.name)
        left = use.seconds_left
        return {
            "id": offered.name,
            "object": "model",
            "aliases": list(offered.names.aliases),
            "adapters": [adapter.name for adapter in offered.model.adapters],
            "state": use.state,
            "size": offered.model.weight_size,
            "memory": use.memory,
            "num_requests": use.num_requests,
            "unloads_in_seconds": None if left is None else round(left, 1),
            "pinned": use.is_pinned,
        }
