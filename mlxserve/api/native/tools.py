"""`/api/v1/tools`: runs tools for the page's chat, for clients that may run programs as the user.

The servers are those of `mcp.json`, as in the terminal, and start when the page asks. The page
shows each call and asks its user; permanent choices are stored with the terminal's.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.same_user import may_run_programs
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.helpers.work import RunsIn, Work
from mlxserve.history.chat_stores import ChatStores
from mlxserve.mcp.results import CallResult
from mlxserve.mcp.servers_file import ToolsError, usual_file
from mlxserve.mcp.toolbox import Permission, ServerCard, Tool, Toolbox

_SETTING_SECONDS = 0.005  # to read or write a setting
_TOOL_SECONDS = 1.0  # for a call of a tool, or the start of the servers
MAX_ARGUMENTS = 1 << 20  # characters

Name = Annotated[str, Field(min_length=1, max_length=200)]


class StartRequest(RequestBody):
    """The body of `POST /api/v1/tools/start`."""


class SwitchRequest(RequestBody):
    """The body of `POST /api/v1/tools/switch`."""

    server: Name
    is_on: bool


class PermissionRequest(RequestBody):
    """The body of `POST /api/v1/tools/permission`."""

    name: Name
    permission: Literal["ask", "always", "never"]


class CallRequest(RequestBody):
    """The body of `POST /api/v1/tools/call`: JSON as the model wrote it."""

    name: Name
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS)] = "{}"


class StoredChoices:
    """Stores choices about tools in the terminal's chat file."""

    def __init__(self, stores: ChatStores, executor: FairExecutor) -> None:
        self._stores = stores
        self._executor = executor

    async def setting(self, name: str) -> str | None:
        reading = partial(self._stores.run, "", lambda store: store.setting(name))
        work: Work[str | None] = Work(_SETTING_SECONDS, reading)
        return await self._executor.run("", work)

    async def set_setting(self, name: str, value: str) -> None:
        writing = partial(self._stores.run, "", lambda store: store.set_setting(name, value))
        work: Work[None] = Work(_SETTING_SECONDS, writing)
        await self._executor.run("", work)


class ToolRoutes:
    """The endpoints over one toolbox, whose tool servers end with this server."""

    def __init__(self, stores: ChatStores, executor: FairExecutor) -> None:
        self.toolbox = Toolbox(usual_file(), StoredChoices(stores, executor))

    def routes(self) -> list[Route]:
        tools = "/api/v1/tools"
        own_route = partial(BodyRoute, of_model=False, admit=check_allowed)
        return [
            Route(tools, self.index, methods=["GET"]),
            own_route(f"{tools}/start", self.start, body=StartRequest),
            own_route(f"{tools}/switch", self.switch, body=SwitchRequest),
            own_route(f"{tools}/permission", self.permit, body=PermissionRequest),
            own_route(f"{tools}/call", self.call, body=CallRequest),
        ]

    def definitions(self) -> list[dict[str, Any]]:
        """Definitions of the tools that the page's models see."""
        return [tool.definition for tool in self.toolbox.offered()]

    async def close(self) -> None:
        """End the tool servers and their processes."""
        await self.toolbox.close()

    async def index(self, request: Request) -> Response:
        """Lists the servers of tools, started or not, with their tools."""
        await check_allowed(request)
        reading: Work[None] = Work(_SETTING_SECONDS, self.toolbox.read)
        await run_fairly(request, reading)
        return json_response(self._list())

    async def start(self, request: Request, _body: StartRequest) -> Response:
        """Starts the servers that are on, and answers when each is ready or has failed."""
        starting: Work[None] = Work(_TOOL_SECONDS, self.toolbox.start, RunsIn.LOOP)
        await run_fairly(request, starting)
        return json_response(self._list())

    async def switch(self, request: Request, body: SwitchRequest) -> Response:
        """Starts a server, also one that failed, or ends it."""

        async def switch() -> None:
            await self.toolbox.start()
            await self.toolbox.switch(body.server, is_on=body.is_on)

        switching: Work[None] = Work(_TOOL_SECONDS, switch, RunsIn.LOOP)
        try:
            await run_fairly(request, switching)
        except ToolsError as error:
            raise ApiError(404, str(error), param="server", code="unknown_server") from error
        return json_response(self._list())

    async def permit(self, _request: Request, body: PermissionRequest) -> Response:
        """Keeps whether a tool is called after asking, always or never."""
        try:
            await self.toolbox.permit(body.name, Permission(body.permission))
        except ToolsError as error:
            raise ApiError(404, str(error), param="name", code="unknown_tool") from error
        return json_response(self._list())

    async def call(self, request: Request, body: CallRequest) -> Response:
        """Calls a tool, to which the user has agreed; stopped when the client leaves."""
        started = time.monotonic()
        calling: Work[CallResult] = Work(
            _TOOL_SECONDS, partial(self.toolbox.call, body.name, body.arguments), RunsIn.LOOP
        )
        result = await run_fairly(request, calling)
        content = {
            "object": "tool_result",
            "text": result.text,
            "is_error": result.is_error,
            "images": list(result.images),
            "seconds": time.monotonic() - started,
        }
        return json_response(content)

    def _list(self) -> dict[str, Any]:
        return {
            "object": "list",
            "file": str(self.toolbox.file),
            "problem": self.toolbox.problem,
            "data": [_server(card) for card in self.toolbox.cards],
        }


async def check_allowed(request: Request) -> None:
    """Raises ApiError 403 for other users: tools run as the server's user."""
    if not await may_run_programs(request):
        raise ApiError(
            403,
            "Tools run programs as the user of the server. They are for programs of that user on its own "
            "machine, or with API keys for those with the scope admin: mlxserve key create NAME --scope admin",
            code="tools_not_allowed",
        )


def _server(card: ServerCard) -> dict[str, Any]:
    return {
        "object": "tool_server",
        "name": card.name,
        "address": card.address,
        "state": card.state,
        "problem": card.problem,
        "is_on": card.is_on,
        "tools": [_tool(tool) for tool in card.tools],
    }


def _tool(tool: Tool) -> dict[str, Any]:
    return {"tool": tool.tool, "permission": tool.permission, **tool.definition["function"]}
