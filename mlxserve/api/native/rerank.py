"""`/v1/rerank`: documents in the order of their relevance to a query, in Jina's and Cohere's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.fields import LongText
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import json_response
from mlxserve.api.service import Service

MAX_DOCUMENTS = 2_048


def _text(value: object) -> object:
    """Read a document, which may be an object with a text."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


_Text = Annotated[LongText, AfterValidator(_not_empty)]
_Document = Annotated[_Text, BeforeValidator(_text)]


class RerankRequest(RequestBody):
    """The body of `POST /v1/rerank`. `instruction` is an extension."""

    query: _Text
    documents: Annotated[
        list[_Document], Field(fail_fast=True, min_length=1, max_length=MAX_DOCUMENTS)
    ]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(max_length=10_000)] | None = None

    @property
    def prompt_field(self) -> str:
        return "documents"


class Rerank:
    """The endpoint over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [BodyRoute("/v1/rerank", self.create, body=RerankRequest)]

    async def create(self, request: Request, body: RerankRequest) -> Response:
        """Ranks documents by their relevance to a query."""
        scores, num_tokens = await self._service.vectors.ranks(
            request, body.query, body.documents, body.instruction
        )
        # The first of equals stays first: Python's sort is stable.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        reply = {
            "model": self._service.model.model_name,
            "results": [_item(index, scores[index], body) for index in order],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_response(reply)


def _item(index: int, score: float, body: RerankRequest) -> dict[str, Any]:
    item: dict[str, Any] = {"index": index, "relevance_score": score}
    if body.return_documents:
        item["document"] = {"text": body.documents[index]}
    return item
