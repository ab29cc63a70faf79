"""`POST /api/v1/chats/import`: chats that mlxserve, ChatGPT or Open WebUI has exported."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.chats.live_chats import LiveChats
from mlxserve.api.errors import ApiError, invalid_value, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.native.chats import check_owner
from mlxserve.helpers.work import Work
from mlxserve.history.chat_file import StoreError
from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.imports import ImportRefused
from mlxserve.history.store import Store
from mlxserve.history.transfer import ImportReport, import_chats

MAX_CHATS = 1_000  # of one request
_WRITTEN_PER_SECOND = 5 << 20  # bytes of exported chats, which are parsed and written
_SECONDS = 0.005


class ChatImportRequest(RequestBody):
    """The body of `POST /api/v1/chats/import`. `chats`: those of an exported file, as they are."""

    chats: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_CHATS)]


class ChatImport:
    """The endpoint that imports chats into the store of the request's key."""

    def __init__(self, stores: ChatStores, live: LiveChats) -> None:
        self._stores = stores
        self._live = live

    def routes(self) -> list[Route]:
        return [
            BodyRoute(
                "/api/v1/chats/import",
                self.add,
                body=ChatImportRequest,
                of_model=False,
                admit=check_owner,
            )
        ]

    async def add(self, request: Request, body: ChatImportRequest) -> Response:
        """Imports chats, each whole or not at all; one that is there already is left as it is."""

        def add(store: Store) -> ImportReport:
            return import_chats(store, body.chats)

        job: Work[ImportReport] = Work(
            _SECONDS + body_size(request) / _WRITTEN_PER_SECOND,
            partial(self._stores.run, key_id(request), add),
        )
        try:
            report = await run_fairly(request, job)
        except ImportRefused as error:
            raise invalid_value("chats", str(error)) from error
        except StoreError as error:
            raise ApiError(503, str(error), code="chats_unavailable") from error
        if report.num_imported:
            self._live.listed(key_id(request))
        return json_response(
            {
                "object": "chat.import",
                "imported": report.num_imported,
                "present": report.num_present,
                "refused": report.num_refused,
                "problems": report.problems,
                "left_out": dict(report.left_out),
            }
        )
