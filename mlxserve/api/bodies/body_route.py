"""BodyRoute: a route with a JSON body, and the rules that hold for all of them.

    admit ──▶ read the body ──▶ validate ──▶ model's name ──▶ prepare ──▶ handler ──▶ warnings
    event     event loop        one job of the client's turn             event       header
    loop                                                                 loop

A handler gets the validated body, and repeats none of this: a name that no model has is refused or
warned of, an error of the engine becomes an error reply, and fields without effect are named in the
reply's header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar, overload

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.json_body import read_json
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import from_engine
from mlxserve.api.model_names import MODEL_NAMES
from mlxserve.api.warnings import reply_header, warn
from mlxserve.core.errors import MlxServeError
from mlxserve.helpers.work import MaybeWork

BodyT = TypeVar("BodyT", bound=RequestBody)
PreparedT = TypeVar("PreparedT")

_BODY = "mlxserve.body"  # in the scope of a request whose body is valid
_UNKNOWN = "mlxserve.unknown_fields"  # beside it: the fields that have no effect


class BodyRoute(Route):
    """A route with a JSON body, which the model `body` validates.

    of_model: the request is for the model that the body names; False if it concerns the whole
        server
    admit: refuses a request by its head, before its body is read
    prepare: turns the body into something, such as a prompt, in the job that reads it, off the
        event loop
    """

    @overload
    def __init__(
        self,
        path: str,
        handler: Callable[[Request, BodyT], Awaitable[Response]],
        *,
        body: type[BodyT],
        of_model: bool = True,
        method: str = "POST",
        admit: Callable[[Request], Awaitable[None] | None] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        path: str,
        handler: Callable[[Request, BodyT, PreparedT], Awaitable[Response]],
        *,
        body: type[BodyT],
        prepare: Callable[[Request, BodyT], MaybeWork[PreparedT]],
        of_model: bool = True,
        method: str = "POST",
        admit: Callable[[Request], Awaitable[None] | None] | None = None,
    ) -> None: ...

    def __init__(
        self,
        path: str,
        handler: Callable[..., Awaitable[Response]],
        *,
        body: type[Any],
        prepare: Callable[[Request, Any], MaybeWork[Any]] | None = None,
        of_model: bool = True,
        method: str = "POST",
        admit: Callable[[Request], Awaitable[None] | None] | None = None,
    ) -> None:
        super().__init__(path, self._reply, methods=[method])
        self.handler = handler
        self.body: type[RequestBody] = body
        self.of_model = of_model
        self.method = method
        self._prepare = prepare
        self._admit = admit

    def unbound(self) -> BodyRoute:
        """Copy the route for documentation, without the object that the handler is a method of."""
        handler = getattr(self.handler, "__func__", self.handler)
        return BodyRoute(
            self.path, handler, body=self.body, of_model=self.of_model, method=self.method
        )

    async def _reply(self, request: Request) -> Response:
        """Run the steps of this module's drawing. Raises ApiError."""
        if self._admit is not None and (admitting := self._admit(request)) is not None:
            await admitting
        scope = request.scope
        try:
            prepared = await read_json(request, partial(self._read, request))
            arguments = () if self._prepare is None else (prepared,)
            response = await self.handler(request, scope[_BODY], *arguments)
        except MlxServeError as error:
            field = scope[_BODY].prompt_field if _BODY in scope else "prompt"
            raise from_engine(error, prompt_param=field) from error
        response.headers.update(reply_header(request, scope[_UNKNOWN]))
        return response

    def _read(self, request: Request, value: dict[str, Any]) -> MaybeWork[Any]:
        """Validate and prepare the body in the client's turn."""
        body = request.scope[_BODY] = self.body.read(value)
        request.scope[_UNKNOWN] = body.unknown_fields
        if self.of_model and (warning := body.check_model(request.scope[MODEL_NAMES])):
            warn(request, warning)
        return None if self._prepare is None else self._prepare(request, body)


def check_subject(routes: Iterable[Route], *, of_model: bool) -> None:
    """Raises ValueError for a body route in the wrong place.

    The routes of a model belong to ModelRoutes: only it knows the names of its model.
    """
    for route in routes:
        if isinstance(route, BodyRoute) and route.of_model is not of_model:
            place = "ModelRoutes" if route.of_model else "create_server_app"
            raise ValueError(f"{route.path}: of_model={route.of_model} belongs to {place}")
