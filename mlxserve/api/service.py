"""Service: the way from a request to its reply, for all routes that answer.

A route reads its own kind of body and brings a `Reply`, which knows its dialect. Submission,
streams and whole replies are the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxserve.api.access.limits import claim
from mlxserve.api.access.security import cache_namespace, client_name, request_id
from mlxserve.api.answers import Answers
from mlxserve.api.bodies.json_body import body_size
from mlxserve.api.bodies.prompt_source import PromptSource
from mlxserve.api.errors import (
    MAX_ENCODED_IN_LOOP,
    ApiError,
    from_engine,
    internal_error,
    json_response,
)
from mlxserve.api.fair_work import (
    ENCODE_SECONDS,
    cancel_on_disconnect,
    forget_body,
    refusal,
    run_fairly,
)
from mlxserve.api.metrics import Metrics
from mlxserve.api.prefix_names import PrefixNames
from mlxserve.api.prompts import Begun, Prompts
from mlxserve.api.server.sse import EVENTS, EventStream, StreamFormat, Write
from mlxserve.api.usage import Tokens
from mlxserve.api.vectors import TextVectors
from mlxserve.api.warnings import warn
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.errors import MlxServeError, QueueFull, UnknownPrefix
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.work import Work
from mlxserve.images.sources import ImageSources
from mlxserve.text.guidance.structures import not_enforced
from mlxserve.text.parsing.turn import AssistantTurn

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel
    from mlxserve.text.deltas import Delta

logger = logging.getLogger(__name__)

_TOKEN_SIZE = 8  # bytes of an answer's token in the last event, generously
_MAX_REPEATED = 4  # how often the first and last events of a stream contain the body


class Reply(Protocol):
    """A reply in one dialect: rendered as events, or as one object."""

    def opening(self) -> bytes:
        """Events before the first delta."""

    def push(self, delta: Delta) -> bytes:
        """Events of one delta; empty if it has no visible content."""

    def ending(self, tokens: Tokens) -> bytes:
        """Events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Events that end the stream with an error."""

    def keepalive(self) -> bytes:
        """Events for a client that has waited long for the next one."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The reply as one object. Raises EngineStopped and GrammarFailed."""


class AnswerFields(Protocol):
    """The fields of every body about how its answer is computed."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def skip_prefix_cache(self) -> bool: ...
    @property
    def priority(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of reading a conversation's body in the client's turn."""

    params: SamplingParams
    turn: AssistantTurn | None
    prompt: Begun


class Service:
    """The shared steps of all routes over one model.

    Methods raise ApiError, and MlxServeError where documented.
    """

    def __init__(
        self,
        model: TextModel,
        metrics: Metrics,
        prefix_names: PrefixNames,
        images: ImageSources,
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.prompts = Prompts(model, images)
        self.vectors = TextVectors(model, self.prompts)
        self.prefix_names = prefix_names

    def begin(
        self,
        request: Request,
        source: PromptSource,
        params: SamplingParams,
        turn: AssistantTurn | None,
    ) -> Work[Prepared]:
        """Work that prepares the prompt of a conversation in the client's turn."""
        return self.prompts.begin(request, source).then(partial(Prepared, params, turn))

    async def submit(
        self,
        request: Request,
        body: AnswerFields,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        num_choices: int = 1,
        turn: AssistantTurn | None = None,
        prefix_name: str | None = None,
    ) -> Answers:
        """Queue the prompts on behalf of the request's API key.

        Raises ApiError for a full queue, and otherwise the errors of `Writer.submit`.
        """
        claim(request, len(prompts) * num_choices)
        options = RequestOptions(
            cache_salt=cache_namespace(request, body.cache_salt),
            skip_prefix_cache=body.skip_prefix_cache,
            client=client_name(request),
            priority=body.priority or 0,
            request_id=request_id(request),
            turn=turn,
            prefix_name=prefix_name and self.prefix_names.full(request, prefix_name),
        )
        if params.n != num_choices:
            params = replace(params, n=num_choices)
        try:
            submission = Answers.submit(self.model, prompts, params, options, self.metrics)
            answers = await cancel_on_disconnect(request, submission)
        except UnknownPrefix as error:
            assert prefix_name is not None
            raise self.prefix_names.unknown(request, prefix_name) from error
        except QueueFull as error:
            is_of_door = error.seconds is not None
            raise (refusal if is_of_door else self.metrics.retry_after.refusal)(error) from error
        forget_body(request)
        if dropped := not_enforced(params.structure, turn):
            warn(request, f"not enforced: {', '.join(dropped)}")
        return answers

    async def reply(
        self,
        request: Request,
        answers: Answers,
        reply: Reply,
        *,
        is_stream: bool | None,
        framing: StreamFormat = EVENTS,
    ) -> Response:
        """Return the answers as a stream or whole, and close them when the client disconnects.

        Raises EngineStopped and GrammarFailed.
        """
        if is_stream:
            return EventStream(
                partial(_write_events, request, answers, reply),
                close=answers.aclose,
                failure=reply.failure,
                keepalive=reply.keepalive,
                framing=framing,
            )
        try:
            whole = await cancel_on_disconnect(request, reply.whole(answers))
        finally:
            await answers.aclose()
        return json_response(whole)


async def _write_events(request: Request, answers: Answers, reply: Reply, write: Write) -> None:
    """Write a reply as events. An error becomes one of them."""
    await write(await _encoded(request, 0, reply.opening))
    try:
        async for delta in answers:
            await write(reply.push(delta))
    except MlxServeError as error:
        await write(reply.failure(from_engine(error)))
    except ClientDisconnect:
        raise
    except Exception:
        logger.exception("A stream of events has failed")
        await write(reply.failure(internal_error()))
    else:
        tokens = answers.tokens
        ending = partial(reply.ending, tokens)
        await write(await _encoded(request, tokens.completion, ending))


async def _encoded(request: Request, num_tokens: int, encode: Callable[[], bytes]) -> bytes:
    """Encode events that may repeat the request's body, or an answer of so many tokens."""
    size = body_size(request) + _TOKEN_SIZE * num_tokens
    if size < MAX_ENCODED_IN_LOOP // _MAX_REPEATED:
        return encode()
    return await run_fairly(request, Work(ENCODE_SECONDS, encode))
