"""ModelDispatch: sends each request to the routes of the model that it names.

    request ──▶ ModelDispatch ──▶ registry.use(name) ──▶ ModelRoutes over the TextModel
                    reads `model` in the body, or ?model= where there is none

Only this file, the list of models and the wiring know that there may be several.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MethodType
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxserve.api.access.keys import Key
from mlxserve.api.access.security import is_admin, models_of_key
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.json_body import read_object
from mlxserve.api.errors import ApiError, error_response, from_engine
from mlxserve.api.fair_work import KEEP_ALIVE, STARTED, WAITED, load_fairly
from mlxserve.api.model_names import MODEL_NAMES, ModelNames
from mlxserve.api.model_routes import ModelRoutes, SharedState
from mlxserve.api.prompts import EMBEDDER
from mlxserve.api.server.loading_stream import LoadingStream
from mlxserve.chat.registry.entries import RegisteredAdapter, RegisteredModel
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.errors import MlxServeError

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel


_EVENTS = "/v1/"  # the beginning of the paths whose streams are server-sent events


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that requests may name, or one of its adapters.

    text_model: None unless the model is loaded
    """

    model: RegisteredModel
    names: ModelNames
    text_model: TextModel | None
    adapter: RegisteredAdapter | None = None

    @property
    def name(self) -> str:
        return self.names.own

    @property
    def size(self) -> int:
        """Bytes of weights that it shares with no other entry."""
        return self.model.weight_size if self.adapter is None else self.adapter.size


class ModelDispatch:
    """Dispatches over a registry whose first model is loaded. Used in the event loop."""

    def __init__(self, registry: ModelRegistry, shared: SharedState, *, is_strict: bool) -> None:
        """is_strict: refuse names that no model has; otherwise the first model answers them."""
        self._registry = registry
        self._shared = shared
        self._is_strict = is_strict
        self._name_all()
        self._first = registry.models[0].name
        self._served: dict[str, ModelRoutes] = {}
        self._restoring: dict[str, asyncio.Future[None]] = {}
        self._is_running = False
        registry.on_unloaded = self._forget

    def _name_all(self) -> None:
        self._offered = {
            _named(model.name, adapter): (model, adapter)
            for model in self._registry.models
            for adapter in (None, *model.adapters)
        }
        self._names = {
            name: ModelNames(
                name,
                tuple(_named(alias, adapter) for alias in model.aliases),
                tuple(_named(alias, adapter) for alias in model.unlisted),
                self._is_strict,
                tuple(other for other in self._offered if other != name),
                has_adapters=adapter is None and bool(model.adapters),
            )
            for name, (model, adapter) in self._offered.items()
        }

    def add(self, model: RegisteredModel) -> None:
        """Serve another model from now on; it is loaded with its first request."""
        self._registry.add(model)
        self._name_all()

    @property
    def names(self) -> list[str]:
        """Names of all models and of their adapters."""
        return list(self._names)

    # ---- the routes

    def own_routes(self) -> list[Route]:
        """The routes of a model with their documentation, bound to no model."""
        first = self._registry.loaded(self._first)
        assert first is not None, "the first model is loaded before the server starts"
        return [_unbound(route) for route in self._routes_of(first).routes]

    def routes(self, own: Sequence[Route]) -> Sequence[Route]:
        """Turn a model's routes into the server's, which pass requests on to the named model."""
        for route in own:
            route.app = self._by_body if isinstance(route, BodyRoute) else self._by_query
        return own

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that gives a model work, loading the model first if necessary."""
        request = Request(scope, receive)
        name, has_stream = self._first, False
        is_loaded = self._registry.loaded(name) is not None
        if len(self._names) > 1 or not is_loaded:
            named, has_stream = _named_in(await read_object(request))
            name = self._first if named is None else self.named(named)
            is_loaded = self._registry.loaded(self._offered[name][0].name) is not None
        self._refuse_others(request, name)
        model, adapter = self._offered[name]
        began = perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            enter = partial(stack.enter_async_context, self._registry.use(model.name))
            entering = enter() if is_loaded else load_fairly(request, enter)
            if not is_loaded:
                early = LoadingStream(scope, send)
                if has_stream and scope["path"].startswith(_EVENTS):
                    send, entering = early.send, early.during(entering)
            try:
                text_model = await entering
            except (MlxServeError, ApiError) as error:
                refusal = error if isinstance(error, ApiError) else not_loaded(error)
                await error_response(refusal)(scope, receive, send)
                return
            routes = self._routes_of(text_model, adapter)
            scope[MODEL_NAMES] = routes.names
            scope[STARTED], scope[WAITED] = began, perf_counter() - began
            scope[KEEP_ALIVE] = partial(self._keep, model.name)
            scope[EMBEDDER] = self._embedder
            await routes.router(scope, receive, send)

    async def _by_query(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that inspects a loaded model or changes its cache."""
        request = Request(scope)
        requested, name = request.query_params.get("model"), self._first
        if requested is not None and len(self._names) > 1:
            name = self._known(requested)
        self._refuse_others(request, name)
        model, adapter = self._offered[name]
        text_model = self._registry.loaded(model.name)
        if text_model is None:
            raise ApiError(
                409, f"The model {name!r} is not loaded.", param="model", code="model_not_loaded"
            )
        await self._routes_of(text_model, adapter).router(scope, receive, send)

    def _embedder(self, request: Request) -> TextModel | None:
        """Return an embedding model that is loaded and that the request's key may use."""
        offered = (
            self._registry.loaded(model.name)
            for name, (model, adapter) in self._offered.items()
            if model.purpose == "embedding" and adapter is None and self.may_use(request, name)
        )
        return next((model for model in offered if model is not None), None)

    def _keep(self, name: str, request: Request, seconds: float) -> str | None:
        """Unload a model after `seconds` without a use.

        Returns None, or the reason if the request may not decide this. Models that stay loaded by
        the server's options do so whatever a request says.
        """
        place = next(model for model in self._registry.models if model.name == name)
        if self._registry.state(name).is_pinned:
            return f"{name} stays loaded: it is pinned"
        if math.isinf(place.keep_alive):
            return f"{name} stays loaded by the server's options"
        if not is_admin(request):
            return f"{name} stays loaded: this API key does not have the scope admin"
        self._registry.keep(name, seconds)
        return None

    def seconds_left(self, name: str) -> float | None:
        """Seconds until a loaded model is unloaded if it stays unused; None for never."""
        return self._registry.state(name).seconds_left

    def memory(self, name: str) -> int:
        """Bytes that are planned for a loaded model: weights, a step and the cache."""
        return self._registry.state(name).memory

    # ---- the models

    def may_use(self, request: Request, name: str) -> bool:
        """True if the request's key may use this model."""
        names = models_of_key(request)
        return not names or any(self._resolve(allowed) == name for allowed in names)

    def _refuse_others(self, request: Request, name: str) -> None:
        """Raises ApiError 403 if the request's key may not use this model."""
        if not self.may_use(request, name):
            allowed = ", ".join(models_of_key(request))
            raise ApiError(
                403,
                f"This API key is not for the model {name!r}, but for: {allowed}.",
                param="model",
                code="model_not_allowed",
            )

    def named(self, name: str) -> str:
        """Resolve a name, ignoring case, `:latest` and the organisation.

        Falls back to the first model, whose routes refuse the name or warn of it.
        """
        return self._resolve(name) or self._base_of(name) or self._first

    def _base_of(self, name: str) -> str | None:
        """Return the model that the name may be an adapter of; its routes refuse the name."""
        means = (own for own, names in self._names.items() if names.may_mean_adapter(name))
        return next(means, None)

    def _resolve(self, name: str) -> str | None:
        for fits in (ModelNames.has, ModelNames.has_nearly):
            for own, names in self._names.items():
                if fits(names, name):
                    return own
        return None

    def _known(self, name: str) -> str:
        """Resolve a name. Raises ApiError 404 if no model has it."""
        if (own := self._resolve(name)) is None:
            raise self._names[self._first].unknown(name)
        return own

    def models(self) -> list[OfferedModel]:
        """All models in their order, each before its adapters."""
        return [self._model(name) for name in self._offered]

    def model(self, name: str, *, is_anthropic: bool = False) -> OfferedModel:
        """The model of this name. Raises ApiError 404."""
        own = self.named(name)
        self._names[own].require(name, is_anthropic=is_anthropic)
        return self._model(own)

    def _model(self, name: str) -> OfferedModel:
        model, adapter = self._offered[name]
        text_model = self._registry.loaded(model.name)
        adapted = None if text_model is None else _adapted(text_model, adapter)
        return OfferedModel(model, self._names[name], adapted, adapter)

    def loaded(self) -> list[ModelRoutes]:
        """The routes of the loaded models, without those of their adapters."""
        models = [self._registry.loaded(model.name) for model in self._registry.models]
        return [self._routes_of(text_model) for text_model in models if text_model is not None]

    def _routes_of(
        self, text_model: TextModel, adapter: RegisteredAdapter | None = None
    ) -> ModelRoutes:
        """The routes of a model or of its adapter. All are made together, and share their metrics."""
        name, metrics = text_model.model_name, None
        if name not in self._served or self._served[name].text_model is not text_model:
            self._forget(name)
            for each in (None, *self._offered[name][0].adapters):
                own = _named(name, each)
                routes = ModelRoutes(
                    _adapted(text_model, each), self._names[own], self._shared, metrics
                )
                self._served[own], metrics = routes, routes.metrics
                if self._is_running:
                    self._restore(own)
        return self._served[_named(name, adapter)]

    def _forget(self, name: str) -> None:
        """Drop the routes of an unloaded model and of its adapters."""
        for adapter in (None, *self._offered[name][0].adapters):
            own = _named(name, adapter)
            self._served.pop(own, None)
            if (restoring := self._restoring.pop(own, None)) is not None:
                restoring.cancel()

    def _restore(self, name: str) -> None:
        self._restoring[name] = asyncio.ensure_future(self._served[name].restore())

    def start(self) -> None:
        """Start to restore the named prefixes of loaded models. Called in the server's event loop."""
        self._is_running = True
        self.loaded()
        for name in self._served:
            self._restore(name)

    async def stop(self) -> None:
        self._is_running = False
        for restoring in self._restoring.values():
            restoring.cancel()
        await asyncio.gather(*self._restoring.values(), return_exceptions=True)

    def drop_prefixes(self, key: Key) -> None:
        """Remove the prefixes of a revoked key. Models that are not loaded will not restore theirs."""
        for routes in self._served.values():
            routes.prefix_names.drop(key)


def _named(name: str, adapter: RegisteredAdapter | None) -> str:
    """The API's name of a model with an adapter."""
    return name if adapter is None else f"{name}:{adapter.name}"


def _adapted(text_model: TextModel, adapter: RegisteredAdapter | None) -> TextModel:
    return text_model if adapter is None else text_model.with_adapter(adapter.name)


def _named_in(body: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return (model, whether it streams) of a body; the route refuses values of other types."""
    name = body.get("model")
    return name if isinstance(name, str) else None, body.get("stream") is True


def _unbound(route: Route) -> Route:
    """Copy a route without the object that its handler belongs to, which holds a TextModel."""
    if isinstance(route, BodyRoute):
        return route.unbound()
    assert isinstance(route.endpoint, MethodType)
    return Route(route.path, route.endpoint.__func__, methods=list(route.methods or ()))


def not_loaded(error: MlxServeError) -> ApiError:
    """The reply for a model that could not be loaded."""
    reply = from_engine(error)
    return ApiError(503, str(error), code="model_not_loaded") if reply.status == 500 else reply
