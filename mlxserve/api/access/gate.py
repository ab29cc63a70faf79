"""Gate: the checks that every request passes before its route, in one place.

    path ─▶ id ─▶ Host ─▶ Origin ─▶ key ─▶ drain ─▶ limits of the key ─▶ route
                  403     403       401    503      429

The checks are functions of the request's head that raise ApiError: they run before any of the body
is read. One ASGI layer calls them, because a coroutine is entered again at each await of what it
wraps: eight layers cost a chat request 40 calls until it was queued.

Until its reply is sent, an admitted request is counted and can be ended early: by the drain, by the
revocation of its key, and by the limits of its key.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.api.access.key_check import KeyCheck
from mlxserve.api.access.keys import Key
from mlxserve.api.access.limits import KeyLimits
from mlxserve.api.access.security import HostCheck, OriginCheck, PageHeaders
from mlxserve.api.errors import NO_SNIFF, ApiError, error_response, speaks_anthropic
from mlxserve.api.fair_work import attach, enter, leave
from mlxserve.api.paths import CanonicalPaths
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.in_flight import EarlyEnd, InFlight
from mlxserve.api.server.loop_watch import tasks_of
from mlxserve.helpers.fair_executor import FairExecutor


class Gate:
    """The only middleware of the server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: CanonicalPaths,
        hosts: HostCheck,
        origins: OriginCheck,
        keys: KeyCheck,
        drain: Drain,
        limits: KeyLimits,
        open_requests: InFlight,
        executor: FairExecutor,
    ) -> None:
        self._app = app
        self._paths = paths
        self._hosts = hosts
        self._origins = origins
        self._keys = keys
        self._drain = drain
        self._limits = limits
        self._open_requests = open_requests
        self._executor = executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Before all checks: these, too, are of the route that is meant.
        scope["path"] = self._paths.canonical(scope["path"])
        attach(scope, self._executor)
        reply = _Reply(scope, send)
        try:
            self._hosts.check(scope)
            reply.page = self._origins.check(scope)
            if reply.page is not None and reply.page.is_preflight:
                await reply.answer_preflight()
                return
            key = await self._keys.check(scope)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, reply.send)
            return
        with tasks_of(scope), self._open_requests.entered(key.sha256 if key else "") as end:
            await self._pass(scope, receive, reply, key, end)

    async def _pass(
        self, scope: Scope, receive: Receive, reply: _Reply, key: Key | None, end: EarlyEnd
    ) -> None:
        """Run the route. A request that must end before its reply has begun is cancelled."""
        task = asyncio.current_task()
        assert task is not None

        def cancel(_end: EarlyEnd) -> None:
            if not reply.has_started:
                task.cancel()

        scope["mlxserve.end"] = end
        end.add_done_callback(cancel)
        try:
            with self._drain.counted(scope), self._limits.counted(scope, key):
                enter(scope, self._executor)
                try:
                    await self._app(scope, receive, reply.send)
                finally:
                    leave(scope)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, reply.send)
        except asyncio.CancelledError:
            if reply.has_started or not end.done():
                raise
            task.uncancel()
            await error_response(end.result())(scope, receive, reply.send)
        finally:
            end.remove_done_callback(cancel)


class _Reply:
    """The reply to one request, with the headers that every reply has.

    page: the CORS headers, if a web page sent the request
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.page: PageHeaders | None = None
        self.has_started = False
        self._scope = scope
        self._send = send
        self._id = scope["mlxserve.request_id"] = uuid.uuid4().hex

    async def send(self, message: Message) -> None:
        self.has_started = True
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if self.page is not None:
                self.page.add_to(headers)
            headers["x-request-id"] = self._id
            headers.update(NO_SNIFF)
            if speaks_anthropic(self._scope):
                headers["request-id"] = self._id
        await self._send(message)

    async def answer_preflight(self) -> None:
        await self.send({"type": "http.response.start", "status": 204, "headers": []})
        await self.send({"type": "http.response.body", "body": b""})
