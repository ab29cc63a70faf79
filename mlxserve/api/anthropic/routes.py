"""Anthropic's routes, `/v1/messages` and `/v1/messages/count_tokens`, as Claude Code and the SDKs use them.

Any `claude-` name means the served model. Unknown betas and kinds of blocks are tolerated, logged
once, and named in a header of each reply. Errors have Anthropic's format because of the path: see
`errors.py`.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import request_id
from mlxserve.api.anthropic.reply import MessageReply
from mlxserve.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.errors import ApiError, json_response
from mlxserve.api.prompts import Begun
from mlxserve.api.service import Prepared, Service
from mlxserve.api.warnings import warnings_of
from mlxserve.helpers.work import Work

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
            BodyRoute(
                "/v1/messages",
                self.messages,
                body=MessagesRequest,
                prepare=self._prepare,
                admit=_check_headers,
            ),
            BodyRoute(
                "/v1/messages/count_tokens",
                self.count_tokens,
                body=CountTokensRequest,
                prepare=self._begin,
                admit=_check_headers,
            ),
        ]

    def _prepare(self, request: Request, body: MessagesRequest) -> Work[Prepared]:
        params = body.sampling(self._service.model.default_params)
        return self._service.begin(request, body.prompt_source(), params, body.turn())

    async def messages(
        self, request: Request, body: MessagesRequest, prepared: Prepared
    ) -> Response:
        """Answers a conversation."""
        prompt = await self._service.prompts.finish(request, prepared.prompt)
        answers = await self._service.submit(
            request, body, [prompt], prepared.params, turn=prepared.turn
        )
        reply = MessageReply(
            id=f"msg_{request_id(request)}",
            model=self._service.model.model_name,
            num_prompt=len(prompt),
            max_tokens=body.max_tokens,
            shows_thinking=body.shows_thinking,
        )
        return await self._service.reply(request, answers, reply, is_stream=body.stream)

    def _begin(self, request: Request, body: CountTokensRequest) -> Work[Begun]:
        return self._service.prompts.begin(request, body.prompt_source())

    async def count_tokens(
        self, request: Request, _body: CountTokensRequest, begun: Begun
    ) -> Response:
        """Counts the input tokens of a message with the same fields, from the same prompt."""
        prompt = await self._service.prompts.finish(request, begun)
        return json_response({"input_tokens": len(prompt)})


def _check_headers(request: Request) -> None:
    """Raises ApiError 400 for a version of the API that is too old."""
    warnings = warnings_of(request)
    for version in request.headers.getlist("anthropic-version"):
        if not _DATE.fullmatch(version) or version < FIRST_VERSION:
            raise ApiError(
                400,
                f"anthropic-version: {version[:40]!r} is not supported; send "
                f"{FIRST_VERSION!r} or a later one.",
            )
        if version > LAST_VERSION:
            warnings.log("A later version", [f"anthropic-version {version}"])
    for betas in request.headers.getlist("anthropic-beta"):
        names = (f"the beta {beta.strip()[:64]}" for beta in betas.split(","))
        warnings.log("Request fields without effect", names)
