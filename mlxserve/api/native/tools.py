"""`/api/v1/tools`: tools of the page's chat, called by this server for those who may run programs as its user.

The servers are those of `mcp.json`, as in the terminal, and start when the page asks. The page shows each call
and asks its user; what the user chose for good is kept with the terminal's choices.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.same_user import may_run_programs
from mlxserve.api.bodies.request_body import BodyRoute, RequestBody, read_request
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.fair_work import cancel_on_disconnect
from mlxserve.api.warnings import Warnings
from mlxserve.history.chat_stores import ChatStores
from mlxserve.mcp.servers_file import ToolsError, usual_file
from mlxserve.mcp.toolbox import Permission, ServerCard, Tool, Toolbox

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
    """Choices about tools in the terminal's file."""

    def __init__(self, stores: ChatStores) -> None:
        self._stores = stores

    async def setting(self, name: str) -> str | None:
        return await self._stores.call("", lambda store: store.setting(name))

    async def set_setting(self, name: str, value: str) -> None:
        await self._stores.call("", lambda store: store.set_setting(name, value))


class ToolRoutes:
    """The endpoints over one toolbox, whose servers end with this one."""

    def __init__(self, stores: ChatStores) -> None:
        self._toolbox = Toolbox(usual_file(), StoredChoices(stores))
        self._warnings = Warnings()

    def routes(self) -> list[Route]:
        tools = "/api/v1/tools"
        return [
            Route(tools, self.index, methods=["GET"]),
            BodyRoute(f"{tools}/start", self.start, body=StartRequest),
            BodyRoute(f"{tools}/switch", self.switch, body=SwitchRequest),
            BodyRoute(f"{tools}/permission", self.permit, body=PermissionRequest),
            BodyRoute(f"{tools}/call", self.call, body=CallRequest),
        ]

    def definitions(self) -> list[dict[str, Any]]:
        """Of the tools that the page's models are told of."""
        return [tool.definition for tool in self._toolbox.offered()]

    async def close(self) -> None:
        """End the servers of tools and their processes."""
        await self._toolbox.close()

    async def index(self, request: Request) -> Response:
        """Lists the servers of tools, started or not, with their tools."""
        await _check_allowed(request)
        await asyncio.to_thread(self._toolbox.read)
        return json_response(self._list())

    async def start(self, request: Request) -> Response:
        """Starts the servers that are on, and answers when each is ready or has failed."""
        await _check_allowed(request)
        asked = await read_request(StartRequest, request)
        await cancel_on_disconnect(request, self._toolbox.start())
        return self._reply(request, asked, self._list())

    async def switch(self, request: Request) -> Response:
        """Starts a server, also one that failed, or ends it."""
        await _check_allowed(request)
        asked = await read_request(SwitchRequest, request)
        try:
            await self._toolbox.start()
            await self._toolbox.switch(asked.server, is_on=asked.is_on)
        except ToolsError as error:
            raise ApiError(404, str(error), param="server", code="unknown_server") from error
        return self._reply(request, asked, self._list())

    async def permit(self, request: Request) -> Response:
        """Keeps whether a tool is called after asking, always or never."""
        await _check_allowed(request)
        asked = await read_request(PermissionRequest, request)
        try:
            await self._toolbox.permit(asked.name, Permission(asked.permission))
        except ToolsError as error:
            raise ApiError(404, str(error), param="name", code="unknown_tool") from error
        return self._reply(request, asked, self._list())

    async def call(self, request: Request) -> Response:
        """Calls a tool, to which the user has agreed; stopped when the client leaves."""
        await _check_allowed(request)
        asked = await read_request(CallRequest, request)
        started = time.monotonic()
        result = await cancel_on_disconnect(
            request, self._toolbox.call(asked.name, asked.arguments)
        )
        content = {
            "object": "tool_result",
            "text": result.text,
            "is_error": result.is_error,
            "seconds": time.monotonic() - started,
        }
        return self._reply(request, asked, content)

    def _list(self) -> dict[str, Any]:
        return {
            "object": "list",
            "file": str(self._toolbox.file),
            "problem": self._toolbox.problem,
            "data": [_server(card) for card in self._toolbox.cards],
        }

    def _reply(self, request: Request, asked: RequestBody, content: dict[str, Any]) -> Response:
        headers = self._warnings.header(request, asked.unknown_fields)
        return json_response(content, headers=headers)


async def _check_allowed(request: Request) -> None:
    """Raises ApiError 403. Tools are programs that run as the server's user."""
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
