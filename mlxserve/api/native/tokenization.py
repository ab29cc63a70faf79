"""`/tokenize` and `/detokenize`: texts as the model's tokens and back, in vLLM's format."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.bodies.messages import conversation_of
from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import from_engine, json_response
from mlxserve.api.fair_work import run_fairly
from mlxserve.api.native.schema import DetokenizeRequest, TokenizeRequest
from mlxserve.api.service import Service
from mlxserve.core.errors import MlxServeError
from mlxserve.text.costs import encode_seconds


class Tokenization:
    """The endpoints over one service. Tokenization runs off the event loop."""

    def __init__(self, service: Service) -> None:
        self._chat = service.chat
        self._prompts = service.prompts
        self._service = service

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/tokenize", self.tokenize, body=TokenizeRequest),
            BodyRoute("/detokenize", self.detokenize, body=DetokenizeRequest),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Turns a text or a conversation into token ids."""
        asked = await read_request(TokenizeRequest, request)
        self._service.check_model(request, asked.model)
        try:
            token_ids = await self._token_ids(request, asked)
        except MlxServeError as error:
            raise from_engine(error, prompt_param=asked.text_field) from error
        reply = {
            "count": len(token_ids),
            "max_model_len": self._chat.max_model_len,
            "tokens": token_ids,
        }
        return json_response(
            reply, headers=self._service.warnings.header(request, asked.unknown_fields)
        )

    async def detokenize(self, request: Request) -> Response:
        """Turns token ids into text."""
        asked = await read_request(DetokenizeRequest, request)
        self._service.check_model(request, asked.model)
        try:
            seconds = encode_seconds(len(asked.tokens))
            text = await run_fairly(
                request, seconds, partial(self._chat.codec.decode, asked.tokens)
            )
        except MlxServeError as error:
            raise from_engine(error) from error
        headers = self._service.warnings.header(request, asked.unknown_fields)
        return json_response({"prompt": text}, headers=headers)

    async def _token_ids(self, request: Request, asked: TokenizeRequest) -> list[int]:
        if asked.prompt is not None:
            encode = partial(self._chat.codec.encode, asked.prompt)
            return await run_fairly(request, encode_seconds(len(asked.prompt)), encode)
        return await self._prompts.of_conversation(
            request,
            partial(conversation_of, asked.messages or ()),
            len(asked.messages or ()),
            asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
        )
