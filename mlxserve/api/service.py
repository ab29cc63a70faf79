"""What the routes stand on: a chat, its names, and the way from a request to its reply.

A route reads its own kind of body and brings a `Reply`, which knows its dialect; admission, streams
and whole replies are the same for all of them and live here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.api.access.limits import claim
from mlxserve.api.access.security import cache_namespace, client_name, request_id
from mlxserve.api.answers import Answers, unless_disconnected
from mlxserve.api.bodies.model_names import ModelNames
from mlxserve.api.bodies.unknown_fields import UnknownFields
from mlxserve.api.errors import from_engine, json_response
from mlxserve.api.metrics import Metrics
from mlxserve.api.prompts import Prompts
from mlxserve.api.server.sse import EventStream
from mlxserve.errors import MlxServeError, QueueFull
from mlxserve.request_options import RequestOptions
from mlxserve.sampling_params import SamplingParams
from mlxserve.text.parsing.turn import AssistantTurn

if TYPE_CHECKING:
    from mlxserve.chat import Chat


class Reply(Protocol):
    """One reply in one dialect."""

    def frames(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        """The reply as events; an engine's error is one of them."""

    def keepalive(self) -> bytes:
        """What is sent while nothing else is."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The reply as one object. Raises EngineStopped."""


class Asked(Protocol):
    """What every body that asks for an answer says."""

    @property
    def stream(self) -> bool | None: ...
    @property
    def unknown_fields(self) -> list[str]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def priority(self) -> int: ...


class Service:
    """One for each app. Methods raise ApiError, and where they say so MlxServeError."""

    def __init__(self, chat: Chat, names: ModelNames, metrics: Metrics) -> None:
        self.chat = chat
        self.names = names
        self.metrics = metrics
        self.prompts = Prompts(chat)
        self.unknown_fields = UnknownFields()

    async def submit(
        self,
        request: Request,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        num_choices: int = 1,
        turn: AssistantTurn | None = None,
    ) -> Answers:
        """Admit what was asked, in the name of its API key. Raises what `Chat.submit` raises, but
        ApiError for a full queue."""
        claim(request, len(prompts) * num_choices)
        options = RequestOptions(
            cache_salt=cache_namespace(request, asked.cache_salt),
            client=client_name(request),
            priority=asked.priority,
            turn=turn,
        )
        try:
            return await Answers.submit(
                self.chat,
                prompts,
                params,
                options,
                self.metrics,
                num_choices=num_choices,
                request_id=request_id(request),
            )
        except QueueFull as error:
            raise self.metrics.retry_after.refusal(error) from error

    async def reply(
        self, request: Request, asked: Asked, answers: Answers, reply: Reply
    ) -> Response:
        """The answers as they come, or whole. Either way they are closed when the client leaves."""
        headers = self.unknown_fields.warn(asked.unknown_fields)
        if asked.stream:
            return EventStream(
                reply.frames(answers),
                close=answers.aclose,
                headers=headers,
                keepalive=reply.keepalive,
            )
        try:
            whole = await unless_disconnected(request.receive, reply.whole(answers))
        except MlxServeError as error:
            raise from_engine(error) from error
        finally:
            await answers.aclose()
        if whole is None:
            return Response(status_code=499)  # nobody reads it
        return json_response(whole, headers=headers)
