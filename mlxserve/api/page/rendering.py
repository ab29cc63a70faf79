"""`POST /api/v1/render`: Markdown as a tree of elements, in its client's turn and within a time."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.request_body import BodyRoute, RequestBody, read_request
from mlxserve.api.errors import json_response
from mlxserve.api.page.markdown import Markdown, Node
from mlxserve.api.turns import in_turn
from mlxserve.api.warnings import Warnings

MAX_TEXTS = 1_000
MAX_CHARACTERS = 500_000  # of all texts of one request
MAX_SECONDS = 2.0  # of one request; what is left then is not parsed
_CHARACTERS_PER_SECOND = 400_000  # of code, on two busy cores of an x86 server


class RenderRequest(RequestBody):
    """The body of `POST /api/v1/render`."""

    texts: Annotated[list[str], Field(max_length=MAX_TEXTS)]

    @model_validator(mode="after")
    def _is_not_too_long(self) -> RenderRequest:
        if sum(map(len, self.texts)) > MAX_CHARACTERS:
            raise ValueError(f"texts: together they may have {MAX_CHARACTERS:,} characters")
        return self


class Rendering:
    """The endpoint."""

    def __init__(self) -> None:
        self._warnings = Warnings()

    def routes(self) -> list[Route]:
        return [BodyRoute("/api/v1/render", self.render, body=RenderRequest)]

    async def render(self, request: Request) -> Response:
        """Parses Markdown for the page: each text as nested lists of [tag, attributes, child, …]."""
        asked = await read_request(RenderRequest, request)
        texts = asked.texts
        seconds = min(sum(map(len, texts)) / _CHARACTERS_PER_SECOND, MAX_SECONDS)
        nodes = await in_turn(request, seconds, lambda: _nodes(texts))
        headers = self._warnings.header(request, asked.unknown_fields)
        return json_response({"data": nodes}, headers=headers)


def _nodes(texts: list[str]) -> list[list[Node]]:
    parser, end = Markdown(), time.thread_time() + MAX_SECONDS
    return [parser.nodes(text, max(0.0, end - time.thread_time())) for text in texts]
