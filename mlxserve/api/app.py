"""The ASGI application: the routes behind the gate, and errors in one format."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.gate import Gate
from mlxserve.api.access.key_check import KeyCheck
from mlxserve.api.access.keys import Keyring
from mlxserve.api.access.limits import KeyLimits
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.access.security import HostCheck, OriginCheck, request_id
from mlxserve.api.bodies.body_route import check_subject
from mlxserve.api.chats.list_events import ListEvents
from mlxserve.api.chats.live_chats import LiveChats
from mlxserve.api.chats.routes import ChatAnswers
from mlxserve.api.dispatch import ModelDispatch
from mlxserve.api.downloads import Downloads, Register
from mlxserve.api.errors import NO_SNIFF, ApiError, error_response, from_engine
from mlxserve.api.fair_work import charge
from mlxserve.api.loading import Loading
from mlxserve.api.model_routes import ModelRoutes, SharedState
from mlxserve.api.models import Models
from mlxserve.api.native.chat_import import ChatImport
from mlxserve.api.native.chats import Chats
from mlxserve.api.native.forgetting import Forgetting
from mlxserve.api.native.saved_prompts import SavedPromptRoutes
from mlxserve.api.native.status import Status
from mlxserve.api.native.tools import ToolRoutes
from mlxserve.api.ollama_models import OllamaModels
from mlxserve.api.openapi import OpenAPI
from mlxserve.api.page.documents import DocumentTexts
from mlxserve.api.page.rendering import Rendering
from mlxserve.api.page.routes import WebPage
from mlxserve.api.paths import CanonicalPaths
from mlxserve.api.responses.store import ResponseStore
from mlxserve.api.responses.stored import StoredResponses
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.loop_watch import LoopWatch
from mlxserve.api.warnings import Warnings
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.core.config import data_home
from mlxserve.core.errors import MlxServeError
from mlxserve.history.chat_stores import ChatStores
from mlxserve.images.remote import RemoteFiles
from mlxserve.images.sources import ImageSources

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.helpers.fair_executor import FairExecutor


logger = logging.getLogger(__name__)

KEYS_INTERVAL = 0.25  # seconds between looks at the key file


def create_app(
    model: TextModel,
    *,
    aliases: Sequence[str] = (),
    unlisted_names: Sequence[str] = (),
    strict_model_names: bool = False,
    access: AccessPolicy | None = None,
    drain: Drain | None = None,
    open_requests: InFlight | None = None,
) -> Starlette:
    """Build the API over one model.

    aliases: other names of the model
    unlisted_names: names that are accepted but not listed
    """
    return create_server_app(
        ModelRegistry.from_model(model, aliases, unlisted_names),
        model.executor,
        strict_model_names=strict_model_names,
        access=access,
        drain=drain,
        open_requests=open_requests,
    )


def create_server_app(
    registry: ModelRegistry,
    executor: FairExecutor,
    *,
    strict_model_names: bool = False,
    access: AccessPolicy | None = None,
    drain: Drain | None = None,
    open_requests: InFlight | None = None,
    register: Register | None = None,
) -> Starlette:
    """Build the API over the models of a registry, whose first model is loaded.

    executor: runs all work on prompts and bodies
    strict_model_names: refuse a request for a model that is not in the registry
    drain, open_requests: shared with the server
    register: makes a registry entry for a downloaded model; None if none can be added
    """
    access = access or AccessPolicy()
    drain = drain or Drain()
    open_requests = open_requests or InFlight()
    keyring = access.keyring()
    store = ResponseStore()
    shared = SharedState(
        keyring=keyring,
        max_prefix_share=access.max_prefix_share_per_key,
        drain=drain,
        responses=store,
        images=ImageSources(_remote_files(access)),
    )
    dispatch = ModelDispatch(registry, shared, is_strict=strict_model_names)
    keyring.on_revoked(dispatch.drop_prefixes)
    keyring.on_revoked(lambda key: open_requests.end(_revoked(), key.sha256))
    chats = ChatStores(data_home())
    tools = ToolRoutes(chats, executor)
    live = LiveChats(chats, executor, tools.toolbox)
    forgetting = Forgetting(partial(_usable, dispatch))
    downloads = Downloads(dispatch, register, executor)
    routes: list[Route] = []
    watch = LoopWatch(routes, partial(charge, executor))
    of_models = dispatch.own_routes()
    of_server = [
        *StoredResponses(store).routes(),
        *Models(dispatch).routes(),
        *OllamaModels(dispatch).routes(),
        *Loading(registry, dispatch).routes(),
        *Status(registry.models[0].name, dispatch.loaded, drain, watch).routes(),
        *Rendering().routes(),
        *DocumentTexts().routes(),
        *ChatImport(chats, live).routes(),
        *ListEvents(live, drain).routes(),
        *Chats(chats, forgetting, tools.definitions, live).routes(),
        *ChatAnswers(chats, live, drain).routes(),
        *SavedPromptRoutes(chats).routes(),
        *forgetting.routes(),
        *tools.routes(),
        *downloads.routes(),
    ]
    check_subject(of_server, of_model=False)
    routes += [
        *dispatch.routes(of_models),
        *of_server,
        *OpenAPI([*of_models, *of_server]).routes(),
        *WebPage().routes(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                Gate,
                paths=CanonicalPaths(routes),
                hosts=HostCheck(access.host_names),
                origins=OriginCheck(access.host_names, access.origins),
                keys=KeyCheck(keyring, is_behind_proxy=access.is_behind_proxy),
                drain=drain,
                limits=KeyLimits(access.max_requests_per_key, access.requests_per_minute_per_key),
                open_requests=open_requests,
                executor=executor,
            )
        ],
        lifespan=partial(
            _beside, keyring, registry, dispatch, chats, watch, (live, tools, downloads)
        ),
        exception_handlers={
            ApiError: _api_error,
            MlxServeError: _engine_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
            Exception: _bug,
        },
    )
    app.state.warnings = Warnings()
    app.router.redirect_slashes = False
    live.attach(app)
    return app


def _remote_files(access: AccessPolicy) -> RemoteFiles | None:
    return None if access.remote_images is None else RemoteFiles(domains=access.remote_images)


def _usable(dispatch: ModelDispatch, request: Request) -> list[ModelRoutes]:
    """The loaded models that the request's key may use."""
    return [
        routes
        for routes in dispatch.loaded()
        if dispatch.may_use(request, routes.text_model.model_name)
    ]


@contextlib.asynccontextmanager
async def _beside(
    keyring: Keyring,
    registry: ModelRegistry,
    dispatch: ModelDispatch,
    chats: ChatStores,
    watch: LoopWatch,
    beside: Sequence[LiveChats | ToolRoutes | Downloads],
    _app: Starlette,
) -> AsyncIterator[None]:
    """Run the background tasks of the server while it accepts requests."""
    watch.start()
    dispatch.start()
    tasks = [asyncio.ensure_future(work) for work in (_follow(keyring), registry.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await dispatch.stop()
        for service in beside:
            await service.close()
        chats.close()
        watch.stop()


async def _follow(keyring: Keyring) -> None:
    """Reload the key file periodically, so that a revoked key loses its access without a request."""
    while True:
        await asyncio.sleep(KEYS_INTERVAL)
        try:
            keyring.refresh()
        except Exception:
            logger.exception("Following the key file failed")


def _revoked() -> ApiError:
    return ApiError(
        401,
        "The API key of this request was revoked.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _engine_error(_request: Request, error: Exception) -> Response:
    """Reply to an error of a route without a body: a `BodyRoute` names the invalid field itself."""
    assert isinstance(error, MlxServeError)
    return error_response(from_engine(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Reply to Starlette's own errors: an unknown route, or a method that the route does not have."""
    assert isinstance(error, HTTPException)
    where = ascii(f"{request.method} {request.url.path}")[1:-1][:200]
    message = {
        404: f"There is no {where}.",
        405: f"{where} is not allowed; see the Allow header.",
    }.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _client_left(_request: Request, _error: Exception) -> Response:
    # The client left while sending, so nobody reads this.
    return Response(status_code=499)


async def _bug(request: Request, _error: Exception) -> Response:
    """Reply to an unexpected error. Starlette raises it again, so the traceback goes to the log only."""
    return error_response(
        ApiError(
            500,
            "Internal server error. See the server's log.",
            code="internal_error",
            headers={"x-request-id": request_id(request), **NO_SNIFF},
        )
    )
