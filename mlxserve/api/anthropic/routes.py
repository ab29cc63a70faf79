"""Anthropic's routes, `/v1/messages` and `/v1/messages/count_tokens`, as Claude Code and the SDKs use them.

Any `claude-` name means the served model. Unknown betas and kinds of blocks are tolerated, logged
once, and named in a header of each reply. Errors have Anthropic's format because of the path: see
`errors.py`.
"""

from __future__ import annotations

import re
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import request_id
from mlxserve.api.anthropic.reply import MessageReply
from mlxserve.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxserve.api.bodies.request_body import BodyRoute, read_request
from mlxserve.api.errors import ApiError, from_engine, json_response
from mlxserve.api.service import Service
from mlxserve.core.errors import MlxServeError

AskedT = TypeVar("AskedT", bound=CountTokensRequest)

# Versions of the API only ever restricted requests, so all accept what the first one allows. A later
# version is accepted with a warning: refusing it would lock out the newest clients.
FIRST_VERSION, LAST_VERSION = "2023-06-01", "2026-10-21"
_DATE = re.compile(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", re.ASCII)


class Anthropic:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            BodyRoute("/v1/messages", self.messages, body=MessagesRequest),
            BodyRoute("/v1/messages/count_tokens", self.count_tokens, body=CountTokensRequest),
        ]

    async def messages(self, request: Request) -> Response:
        """Answers a conversation."""
        asked = await self._read(MessagesRequest, request)
        params = asked.sampling(self._service.chat.default_params)
        turn = asked.turn()
        try:
            prompt = await self._prompt(request, asked)
            answers = await self._service.submit(request, asked, [prompt], params, turn=turn)
        except MlxServeError as error:
            raise from_engine(error, prompt_param="messages") from error
        reply = MessageReply(
            id=f"msg_{request_id(request)}",
            model=self._service.chat.model_name,
            num_prompt=len(prompt),
            max_tokens=asked.max_tokens,
            shows_thinking=asked.shows_thinking,
        )
        return await self._service.reply(request, asked, answers, reply)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the input tokens of a message with the same fields, from the same prompt."""
        asked = await self._read(CountTokensRequest, request)
        try:
            prompt = await self._prompt(request, asked)
        except MlxServeError as error:
            raise from_engine(error, prompt_param="messages") from error
        headers = self._service.warnings.header(request, asked.unknown_fields)
        return json_response({"input_tokens": len(prompt)}, headers=headers)

    async def _read(self, kind: type[AskedT], request: Request) -> AskedT:
        self._check_headers(request)
        asked = await read_request(kind, request)
        self._service.check_model(request, asked.model, is_anthropic=True)
        return asked

    async def _prompt(self, request: Request, asked: CountTokensRequest) -> list[int]:
        return await self._service.prompts.of_conversation(
            request,
            asked.conversation,
            len(asked.messages),
            asked.template_kwargs(),
            tools=asked.definitions,
            continues=asked.continues,
        )

    def _check_headers(self, request: Request) -> None:
        for version in request.headers.getlist("anthropic-version"):
            if not _DATE.fullmatch(version) or version < FIRST_VERSION:
                raise ApiError(
                    400,
                    f"anthropic-version: {version[:40]!r} is not supported; send "
                    f"{FIRST_VERSION!r} or a later one.",
                )
            if version > LAST_VERSION:
                self._service.warnings.log("A later version", [f"anthropic-version {version}"])
        for betas in request.headers.getlist("anthropic-beta"):
            names = (f"the beta {beta.strip()[:64]}" for beta in betas.split(","))
            self._service.warnings.log("Request fields without effect", names)
