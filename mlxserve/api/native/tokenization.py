"""`/tokenize` and `/detokenize`: texts as the model's tokens and back, in vLLM's format."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import json_response
from mlxserve.api.native.schema import DetokenizeRequest, TokenizeRequest
from mlxserve.api.prompts import Begun
from mlxserve.api.service import Service
from mlxserve.helpers.work import Work
from mlxserve.text.costs import encode_seconds


class Tokenization:
    """The endpoints over one service. Tokenization runs off the event loop."""

    def __init__(self, service: Service) -> None:
        self._model = service.model
        self._prompts = service.prompts

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/tokenize", self.tokenize, body=TokenizeRequest, prepare=self._encode),
            BodyRoute("/detokenize", self.detokenize, body=DetokenizeRequest, prepare=self._decode),
        ]

    def _encode(self, request: Request, body: TokenizeRequest) -> Work[Begun]:
        if body.prompt is not None:
            seconds = encode_seconds(len(body.prompt))
            return Work(seconds, partial(self._model.codec.encode, body.prompt))
        return self._prompts.begin(request, body.prompt_source())

    async def tokenize(self, request: Request, _body: TokenizeRequest, begun: Begun) -> Response:
        """Turns a text or a conversation into token ids."""
        token_ids = await self._prompts.finish(request, begun)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._model.max_model_len,
                "tokens": token_ids,
            }
        )

    def _decode(self, _request: Request, body: DetokenizeRequest) -> Work[str]:
        return Work(
            encode_seconds(len(body.tokens)), partial(self._model.codec.decode, body.tokens)
        )

    async def detokenize(self, _request: Request, _body: DetokenizeRequest, text: str) -> Response:
        """Turns token ids into text."""
        return json_response({"prompt": text})
