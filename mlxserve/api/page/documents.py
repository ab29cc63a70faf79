"""`POST /api/v1/documents`: the text of a file, for a question of the page."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import invalid_value, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.work import Work
from mlxserve.history.picture import MAX_DOCUMENT
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.reader import DocumentReader, document_reader
from mlxserve.text.documents.sent import SentDocument, text_url

MAX_DATA = 48 << 20  # characters of base64
_MAX_NAME = 200
_ENCODED_PER_SECOND = 50_000_000  # characters


class DocumentRequest(RequestBody):
    """The body of `POST /api/v1/documents`. `data` is the file in base64."""

    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    data: Annotated[str, Field(max_length=MAX_DATA)]


class DocumentTexts:
    """The endpoint that reads documents."""

    def __init__(self, reader: DocumentReader | None = None) -> None:
        self._reader = reader or document_reader()

    def routes(self) -> list[Route]:
        return [BodyRoute("/api/v1/documents", self.read, body=DocumentRequest, of_model=False)]

    async def read(self, request: Request, body: DocumentRequest) -> Response:
        """Reads a file: its text as a data: URL, with form feeds between pages, and how much it is."""
        sent = SentDocument(body.name, f"data:;base64,{body.data}")
        fairly = partial(run_fairly, request)
        try:
            document = await self._reader.read_sent(sent, fairly, key_id(request))
        except InvalidRequest as error:
            raise invalid_value("data", str(error)) from error
        encoding: Work[str] = Work(
            len(document.text) / _ENCODED_PER_SECOND, partial(_encoded, document)
        )
        url = await fairly(encoding)
        if len(url) > MAX_DOCUMENT:
            raise invalid_value(
                "data", "has too much text for a chat; ask about it with `mlxserve run -f`"
            )
        return json_response({"name": body.name, "url": url, "size": document.size_label})


def _encoded(document: Document) -> str:
    return text_url(document.text)
