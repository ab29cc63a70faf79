"""`POST /infill`: the text between what is before and after a cursor, in llama.cpp's format.

llama.vscode and llama.vim complete code with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.answers import Answers
from mlxserve.api.bodies.body_route import BodyRoute
from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, LongText, stop_strings
from mlxserve.api.bodies.generation import NO_LIMIT, RepetitionPenalty, SamplingFields
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.api.errors import ApiError
from mlxserve.api.prompts import InfillPrompt
from mlxserve.api.server.sse import KEEPALIVE, event
from mlxserve.api.service import Service
from mlxserve.api.usage import Tokens
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.helpers.work import Work
from mlxserve.request import FinishReason
from mlxserve.text.fill_in_middle import OtherFile

if TYPE_CHECKING:
    from mlxserve.text.deltas import Delta

MAX_FILES = 256


class ExtraFile(StrictModel):
    """A piece of another file, for context."""

    text: LongText = ""
    filename: Annotated[str, Field(max_length=4 * MAX_NAME_LENGTH)] = ""


class InfillRequest(SamplingFields):
    """The body of `POST /infill`. `prompt` is the beginning of the middle."""

    input_prefix: LongText = ""
    input_suffix: LongText = ""
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True, max_length=MAX_FILES)] = Field(
        default_factory=list
    )
    prompt: LongText = ""
    n_predict: Annotated[int, Field(ge=-2, le=NO_LIMIT)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    repeat_penalty: RepetitionPenalty | None = None

    @property
    def prompt_field(self) -> str:
        return "input_prefix"

    @property
    def is_warming(self) -> bool:
        """True if only the prompt is to be computed, for a next request that begins like this one."""
        return self.n_predict == 0

    @property
    def files(self) -> list[OtherFile]:
        return [OtherFile(file.filename, file.text) for file in self.input_extra]

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the request's fields. Raises ApiError 400."""
        own: dict[str, Any] = {}
        if self.n_predict is not None:
            own["max_tokens"] = NO_LIMIT if self.n_predict < 0 else max(self.n_predict, 1)
        if self.repeat_penalty is not None:
            own["repetition_penalty"] = self.repeat_penalty
        return self.sampling_of(defaults, own)

    def _field_named(self, name: str) -> str:
        return {"repetition_penalty": "repeat_penalty"}.get(name, name)


class Infill:
    """The endpoint over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.model

    def routes(self) -> list[Route]:
        return [BodyRoute("/infill", self.infill, body=InfillRequest, prepare=self._prepare)]

    def _prepare(self, _request: Request, body: InfillRequest) -> Work[InfillPrompt]:
        return self._service.prompts.infilling(
            [body.input_prefix + body.prompt],
            body.input_suffix,
            body.sampling(self._model.default_params),
            field="input_suffix",
            files=body.files,
        )

    async def infill(
        self, request: Request, body: InfillRequest, prepared: InfillPrompt
    ) -> Response:
        """Fills in the middle between a prefix and a suffix."""
        answers = await self._service.submit(request, body, prepared.prompts, prepared.params)
        reply = InfillReply(self._model.model_name, self._model.max_model_len, answers)
        reply.is_shown = not body.is_warming
        return await self._service.reply(request, answers, reply, is_stream=body.stream)


@dataclass(slots=True)
class InfillReply:
    """The reply to one request, whole or as events."""

    model: str
    context: int
    answers: Answers
    is_shown: bool = True
    _last: FinishReason | None = None
    _stop: str | None = None

    async def whole(self, answers: Answers) -> dict[str, Any]:
        text = ""
        async for delta in answers:
            text += delta.text
            self._see(delta)
        return {**self._end(answers.tokens), "content": text if self.is_shown else ""}

    def opening(self) -> bytes:
        return b""

    def push(self, delta: Delta) -> bytes:
        self._see(delta)
        if not delta.text or not self.is_shown:
            return b""
        return event({"content": delta.text, "stop": False})

    def ending(self, tokens: Tokens) -> bytes:
        return event(self._end(tokens))

    def failure(self, error: ApiError) -> bytes:
        return event(error.body())

    def keepalive(self) -> bytes:
        return KEEPALIVE

    def _see(self, delta: Delta) -> None:
        self._last, self._stop = delta.finish_reason, delta.stop

    def _end(self, tokens: Tokens) -> dict[str, Any]:
        timing = self.answers.timing
        is_cut = self._last is FinishReason.LENGTH
        kind = "limit" if is_cut else "eos" if self._stop is None else "word"
        return {
            "content": "",
            "stop": True,
            "model": self.model,
            "stop_type": kind,
            "stopping_word": self._stop or "",
            "truncated": False,
            "tokens_evaluated": tokens.prompt,
            "tokens_predicted": tokens.completion,
            "tokens_cached": tokens.cached,
            "generation_settings": {"n_ctx": self.context},
            "timings": {
                **_timings("prompt", tokens.prompt - tokens.cached, timing.to_first_token),
                **_timings("predicted", tokens.completion, timing.since_first_token),
            },
        }


def _timings(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": 1_000 * seconds,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }
