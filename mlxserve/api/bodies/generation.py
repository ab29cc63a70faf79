"""The generation fields that OpenAI's endpoints share, and our extensions of them.

Types are checked here, ranges by `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import (
    MAX_NAME_LENGTH,
    TemplateKwargs,
    stop_strings,
    template_kwargs,
    token_biases,
)
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.api.bodies.structured import StructuredOutputs
from mlxserve.api.bodies.tools import (
    Budget,
    ToolChoiceField,
    thinking_budget,
    thinking_kwargs,
    turn_of,
)
from mlxserve.api.errors import ApiError
from mlxserve.errors import InvalidParameter
from mlxserve.sampling_params import SamplingParams, Structure
from mlxserve.text.parsing.turn import AssistantTurn

MAX_CHOICES = 8
MAX_MAX_TOKENS = 2**31 - 1
_SAMPLING = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stop_on_repetition",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)

TemplateKwargsField: TypeAlias = Annotated[TemplateKwargs, PlainValidator(template_kwargs)]


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class GenerationFields(RequestBody):
    """What `/v1/chat/completions`, `/v1/completions` and `/v1/responses` have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_MAX_TOKENS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    stop_on_repetition: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(token_biases)] = Field(
        default_factory=dict
    )
    structured_outputs: StructuredOutputs = None
    prefix_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    skip_prefix_cache: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the given fields. Raises ApiError 400."""
        given = {**self.sent(_SAMPLING), "structure": self.structure()}
        return sampling_params(defaults, {**given, **self._own_sampling()}, self._field_named)

    def structure(self) -> Structure | None:
        """What the text has to match. Raises ApiError 400 if two fields specify it."""
        asked = [s for s in (self.structured_outputs, self._own_format()) if s is not None]
        if len(asked) > 1:
            raise ApiError(
                400,
                f"structured_outputs: cannot be combined with `{asked[1].field.split('.')[0]}`.",
                param="structured_outputs",
                code="invalid_value",
            )
        return asked[0] if asked else None

    def _own_format(self) -> Structure | None:
        return None

    def _own_sampling(self) -> dict[str, Any]:
        raise NotImplementedError

    def _field_named(self, name: str) -> str:
        return name


class ToolGenerationFields(GenerationFields):
    """What the two endpoints whose answers may think and call tools have in common."""

    chat_template_kwargs: TemplateKwargsField = Field(default_factory=dict)
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    thinking_budget: Budget | None = None

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates know them. Raises ApiError 400."""
        raise NotImplementedError

    @property
    def effort(self) -> str | None:
        raise NotImplementedError

    @property
    def template_kwargs(self) -> TemplateKwargs:
        return thinking_kwargs(self.effort, self.chat_template_kwargs)

    def turn(self) -> AssistantTurn:
        """Raises ApiError 400."""
        return turn_of(
            self.definitions,
            self.tool_choice,
            parallel=self.parallel_tool_calls,
            thinking_budget=thinking_budget(self.thinking_budget, self.template_kwargs),
        )


def sampling_params(
    defaults: SamplingParams, given: Mapping[str, Any], field_named: Callable[[str], str]
) -> SamplingParams:
    """The model's defaults, overridden by `given`. Raises ApiError 400.

    `field_named` turns a name of `SamplingParams` into the field that the client sent.
    """
    try:
        return dataclasses.replace(defaults, **given)
    except InvalidParameter as error:
        name = field_named(error.name)
        message = str(error).removeprefix(f"{error.name}: ")
        raise ApiError(400, f"{name}: {message}", param=name, code="invalid_value") from error
