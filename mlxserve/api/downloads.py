"""`/api/v1/downloads`: downloads a model while the others answer, and then serves it as well.

    offered ──▶ running ──▶ done: in the registry, and the default of later commands
                 │  ▲
                 ▼  │
                paused, failed: fetched parts stay, and are not fetched again

Only clients that may run programs as the server's user are served. The commands `mlxserve models`,
`pull` and `use` do the work, in processes of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.same_user import may_run_programs
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.dispatch import ModelDispatch
from mlxserve.api.errors import ApiError, json_response
from mlxserve.chat.registry.entries import RegisteredModel
from mlxserve.core.errors import MlxServeError
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import Work
from mlxserve.hub.model_choices import Downloaded, Model, ModelCatalog, ModelCommandFailed, best_of

Register = Callable[
    [str], RegisteredModel
]  # a model on this machine, by its name. Raises MlxServeError

_MAX_NAME = 200
_REGISTER_SECONDS = 0.3  # to read a model's small files


class NamedModelRequest(RequestBody):
    """The body of `POST /api/v1/downloads`, `…/pause` and `/api/v1/models/use`."""

    model: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]


@dataclass(slots=True)
class Download:
    """The progress of one download.

    state: "running", "paused", "failed" or "done"
    done, total: bytes; `total` is None until it is known
    """

    model: str
    state: str = "running"
    done: int = 0
    total: int | None = None
    problem: str = ""
    task: asyncio.Task[None] | None = None

    def card(self) -> dict[str, Any]:
        return {
            "object": "download",
            "model": self.model,
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "problem": self.problem,
        }


class Downloads:
    """The endpoints. One model is downloaded at a time."""

    def __init__(
        self,
        dispatch: ModelDispatch,
        register: Register | None,
        executor: FairExecutor,
        catalog: ModelCatalog | None = None,
    ) -> None:
        """register: None for a server that cannot add models; it then offers none."""
        self._dispatch = dispatch
        self._register = register
        self._executor = executor
        self._catalog = catalog or ModelCatalog()
        self._downloads: dict[str, Download] = {}
        # The search for a model that suits this machine.
        self._looking: asyncio.Task[Model | None] | None = None

    def routes(self) -> list[Route]:
        downloads = "/api/v1/downloads"
        own_route = partial(BodyRoute, of_model=False, admit=_require_owner)
        return [
            Route(downloads, self.index, methods=["GET"]),
            own_route(downloads, self.start, body=NamedModelRequest),
            own_route(f"{downloads}/pause", self.pause, body=NamedModelRequest),
            own_route("/api/v1/models/use", self.use, body=NamedModelRequest),
        ]

    async def close(self) -> None:
        """Pause the running download."""
        tasks = [self._looking, *(download.task for download in self._downloads.values())]
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)

    async def index(self, request: Request) -> Response:
        """Lists downloads since the start, and the model that suits this machine best."""
        await _require_owner(request)
        offered = None if self._register is None else await self._suited()
        return json_response(
            {
                "object": "list",
                "data": [download.card() for download in self._downloads.values()],
                "recommended": None if offered is None else _offer(offered),
            }
        )

    async def start(self, _request: Request, body: NamedModelRequest) -> Response:
        """Starts or resumes a download. The model is served, and chosen for later, once it is here."""
        if self._register is None:
            raise ApiError(
                409, "This server serves the models that it was started with.", code="fixed_models"
            )
        under_way = [each.model for each in self._downloads.values() if each.state == "running"]
        if under_way and under_way != [body.model]:
            raise ApiError(409, f"{under_way[0]} is being downloaded. Pause it first.", code="busy")
        if not under_way:
            download = self._downloads[body.model] = Download(body.model)
            download.task = asyncio.create_task(self._run(download, self._register))
        return json_response(self._downloads[body.model].card())

    async def pause(self, _request: Request, body: NamedModelRequest) -> Response:
        """Pauses a download; what was fetched stays."""
        if body.model not in self._downloads:
            raise ApiError(
                404, "There is no such download.", param="model", code="unknown_download"
            )
        download = self._downloads[body.model]
        if download.task is not None and download.state == "running":
            download.task.cancel()
            await asyncio.wait({download.task})
        return json_response(self._downloads[body.model].card())

    async def use(self, _request: Request, body: NamedModelRequest) -> Response:
        """Keeps which of the served models commands take where none is named, as `mlxserve use` does."""
        model = self._dispatch.model(body.model).model
        # The name by which the user chose it.
        name = model.unlisted[0] if model.unlisted else model.name
        try:
            await self._catalog.use(name)
        except ModelCommandFailed as error:
            raise ApiError(409, str(error), param="model", code="not_remembered") from error
        return json_response({"object": "model", "model": name})

    async def _suited(self) -> Model | None:
        """Find the recommended model once, which takes seconds."""
        if self._looking is None or (self._looking.done() and self._looking.exception()):
            self._looking = asyncio.create_task(self._look())
        try:
            return await asyncio.shield(self._looking)
        except ModelCommandFailed as error:
            raise ApiError(503, str(error), code="models_unknown") from error

    async def _look(self) -> Model | None:
        return best_of(await self._catalog.find())

    async def _run(self, download: Download, register: Register) -> None:
        try:
            model = await self._fetch(download)
            if model.refusal:
                raise ModelCommandFailed(model.refusal)
            if model.name not in self._dispatch.names:
                reading: Work[RegisteredModel] = Work(
                    _REGISTER_SECONDS, partial(register, model.name)
                )
                self._dispatch.add(await self._executor.run("", reading))
            await self._catalog.use(model.name)
        except asyncio.CancelledError:
            download.state = "paused"
            raise
        except MlxServeError as error:
            download.state, download.problem = "failed", str(error)
        else:
            download.state = "done"

    async def _fetch(self, download: Download) -> Model:
        """Download a model, updating the progress. Raises ModelCommandFailed."""
        async with aclosing(self._catalog.download(download.model)) as steps:
            async for step in steps:
                if isinstance(step, Downloaded):
                    download.done, download.total = step.done, step.total
                else:
                    return step
        raise ModelCommandFailed("The download stopped early. Try again.")


def _offer(model: Model) -> dict[str, Any]:
    return {
        "model": model.name,
        "short_name": model.short_name or None,
        "size": model.weight_size,
        "is_here": model.is_here,
        "context": model.usable_context,
        "good_for": model.good_for,
    }


async def _require_owner(request: Request) -> None:
    """Raises ApiError 403 for other users: a download fills the disk of the server's user."""
    if not await may_run_programs(request):
        raise ApiError(
            403,
            "Models are downloaded for programs of the server's own user on its own machine, or with API "
            "keys for those with the scope admin.",
            code="downloads_not_allowed",
        )
