"""`/v1/embeddings`: texts as vectors, from the hidden states of the served model.

A text's vector is the mean of its tokens' last hidden states, or with `pooling: "last"` the last
token's, scaled to length one. Texts of several clients are computed in turns
(`mlxserve.engine.text_queue`), each in pieces between which running answers continue.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import client_name
from mlxserve.api.bodies.fields import Prompt, prompts
from mlxserve.api.bodies.request_body import BodyRoute, RequestBody, read_request
from mlxserve.api.errors import from_engine, invalid_value, json_response
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.api.service import Service
from mlxserve.api.turns import refusal, unless_left
from mlxserve.errors import ClientQueueFull, MlxServeError, PromptTooLong, QueueFull
from mlxserve.request import Pooling

MAX_TOKENS = 300_000  # of all texts of a request, as in OpenAI's API
MAX_DIMENSIONS = 65_536
MAX_WAITING, MAX_CLIENT_WAITING = 256, 64  # requests, of all clients and of one


class EmbeddingsRequest(RequestBody):
    """The body of `POST /v1/embeddings`. `pooling` is an extension."""

    input: Annotated[tuple[Prompt, ...], PlainValidator(prompts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    pooling: Literal["mean", "last"] = "mean"


class Embeddings:
    """The endpoint over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_waiting: Counter[str] = Counter()  # requests of each client
        self._retry_after = RetryAfter()

    def routes(self) -> list[Route]:
        return [BodyRoute("/v1/embeddings", self.create, body=EmbeddingsRequest)]

    async def create(self, request: Request) -> Response:
        """Computes the vectors of texts."""
        asked = await read_request(EmbeddingsRequest, request)
        self._service.check_model(request, asked.model)
        texts = await self._service.prompts.of_texts(request, asked.input, "input")
        num_tokens = sum(map(len, texts))
        client = client_name(request)
        self._check(texts, num_tokens, client)
        try:
            vectors = await unless_left(request, self._embedded(asked, texts, client))
        except MlxServeError as error:
            raise from_engine(error, prompt_param="input") from error
        reply = {
            "object": "list",
            "data": [_item(index, vector, asked) for index, vector in enumerate(vectors)],
            "model": self._service.chat.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        headers = self._service.warnings.header(request, asked.unknown_fields)
        return json_response(reply, headers=headers)

    async def _embedded(
        self, asked: EmbeddingsRequest, texts: Sequence[Sequence[int]], client: str
    ) -> list[list[float]]:
        """Text by text. Raises what `Chat.embed` raises."""
        self._num_waiting[client] += 1
        try:
            return [
                await self._service.chat.embed(
                    text,
                    pooling=Pooling(asked.pooling),
                    dimensions=asked.dimensions,
                    client=client,
                )
                for text in texts
            ]
        finally:
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]
            self._retry_after.ended()

    def _check(self, texts: Sequence[Sequence[int]], num_tokens: int, client: str) -> None:
        """Refuse what can be refused before anything is computed."""
        longest = max(map(len, texts))
        if longest > self._service.chat.max_model_len:
            too_long = PromptTooLong.for_embedding(longest, self._service.chat.max_model_len)
            raise from_engine(too_long, prompt_param="input")
        if num_tokens > MAX_TOKENS:
            raise invalid_value(
                "input", f"has {num_tokens} tokens; {MAX_TOKENS} are allowed in one request"
            )
        seconds = self._retry_after.seconds()
        if self._num_waiting[client] >= MAX_CLIENT_WAITING:
            message = "Too many embedding requests of yours are waiting. Wait for some to finish."
            raise refusal(ClientQueueFull(message, seconds=seconds))
        if self._num_waiting.total() >= MAX_WAITING:
            message = "Too many embedding requests are waiting."
            raise refusal(QueueFull(message, seconds=seconds))


def _item(index: int, vector: Sequence[float], asked: EmbeddingsRequest) -> dict[str, Any]:
    """Base64 is of little-endian float32. OpenAI's clients ask for it and decode it by themselves."""
    value: object = vector
    if asked.encoding_format == "base64":
        value = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return {"object": "embedding", "index": index, "embedding": value}
