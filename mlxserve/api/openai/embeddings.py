"""`/v1/embeddings`: texts as vectors, in OpenAI's format."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.fields import MAX_DIMENSIONS, Prompt, prompts
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.errors import json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.service import Service
from mlxserve.helpers.work import Work
from mlxserve.request import Pooling

_NUMBERS_PER_SECOND = 5_000_000  # in base64


class EmbeddingsRequest(RequestBody):
    """The body of `POST /v1/embeddings`. `pooling` and `input_type` are extensions."""

    input: Annotated[tuple[Prompt, ...], PlainValidator(prompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    pooling: Literal["mean", "last"] | None = None
    input_type: Annotated[str, Field(max_length=100)] | None = None

    @property
    def prompt_field(self) -> str:
        return "input"


class Embeddings:
    """The endpoint over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [BodyRoute("/v1/embeddings", self.create, body=EmbeddingsRequest)]

    async def create(self, request: Request, body: EmbeddingsRequest) -> Response:
        """Computes the vectors of texts."""
        vectors, num_tokens = await self._service.vectors.embed(
            request,
            body.input,
            pooling=None if body.pooling is None else Pooling(body.pooling),
            dimensions=body.dimensions,
            input_type=body.input_type,
        )
        items: Work[list[dict[str, Any]]] = Work(
            sum(map(len, vectors)) / _NUMBERS_PER_SECOND,
            lambda: [_item(index, vector, body) for index, vector in enumerate(vectors)],
        )
        reply = {
            "object": "list",
            "data": await run_fairly(request, items),
            "model": self._service.model.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_response(reply)


def _item(index: int, vector: Sequence[float], body: EmbeddingsRequest) -> dict[str, Any]:
    """One vector. In base64, which OpenAI's clients decode themselves, it is little-endian float32."""
    value: object = vector
    if body.encoding_format == "base64":
        value = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return {"object": "embedding", "index": index, "embedding": value}
