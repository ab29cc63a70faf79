"""The generation fields that OpenAI's endpoints share, and our extensions of them.

Types are checked here, ranges by `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from mlxserve.api.bodies.fields import (
    MAX_NAME_LENGTH,
    MAX_TOKEN_ID,
    bounded,
    stop_strings,
    token_biases,
)
from mlxserve.api.bodies.prompt_source import ConversationBody
from mlxserve.api.bodies.request_body import RequestBody, StrictModel
from mlxserve.api.bodies.structured import StructuredOutputs
from mlxserve.api.bodies.tools import ToolChoiceField, turn_of
from mlxserve.api.errors import invalid_value
from mlxserve.core.errors import InvalidParameter
from mlxserve.core.sampling_params import MAX_BIAS, SamplingParams, Structure
from mlxserve.request import BACKGROUND
from mlxserve.text.parsing.turn import AssistantTurn

MAX_CHOICES = 8


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0


_MOST = NO_LIMIT = 2**31 - 1
# Other servers' words: -1 is no limit, and no limit to the candidates.
MaxTokens: TypeAlias = Annotated[
    int, Field(ge=1, le=NO_LIMIT), BeforeValidator(lambda sent: NO_LIMIT if sent == -1 else sent)
]
# The smallest share of the probability: of the most probable token alone.
_MIN_TOP_P = 1e-9
TopP: TypeAlias = Annotated[
    float, BeforeValidator(lambda sent: _MIN_TOP_P if _is_zero(sent) else sent), bounded("top_p")
]
Penalty: TypeAlias = Annotated[float, bounded("presence_penalty")]
RepetitionPenalty: TypeAlias = Annotated[float, bounded("repetition_penalty")]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
# `SamplingParams` checks them, and names the field.
Logprobs: TypeAlias = Annotated[
    int, Field(json_schema_extra={"minimum": 0, "maximum": SamplingParams.MAX_LOGPROBS})
]
_StopToken: TypeAlias = Annotated[
    int, Field(json_schema_extra={"minimum": 0, "maximum": MAX_TOKEN_ID})
]
_Bias: TypeAlias = Annotated[
    float, Field(json_schema_extra={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})
]
TopK: TypeAlias = Annotated[
    int, Field(ge=0, le=_MOST), BeforeValidator(lambda sent: 0 if sent == -1 else sent)
]
Priority: TypeAlias = Annotated[
    int,
    Field(ge=-(2**31), le=_MOST),
    BeforeValidator(lambda sent: BACKGROUND if sent == "background" else sent),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": -(2**31), "maximum": _MOST},
                {"const": "background"},
            ]
        }
    ),
]
# Fields that are parameters of sampling under their own names, wherever a route has them.
_SAMPLING = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "stop_on_repetition", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # without effect: pieces are never padded


class SamplingFields(RequestBody):
    """The fields that all generating routes share. Those that an API lacks are extensions."""

    stream: bool | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST)] | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    seed: Seed | None = None
    stop_on_repetition: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    skip_prefix_cache: bool = False
    priority: Priority | None = None

    def sampling_of(self, defaults: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
        """The model's defaults, overridden by the request's fields and by `own`. Raises ApiError 400."""
        sent = self.sent(name for name in _SAMPLING if name in type(self).model_fields)
        try:
            return dataclasses.replace(defaults, **sent, **own)
        except InvalidParameter as error:
            name = self._field_named(error.name)
            message = str(error).removeprefix(f"{error.name}: ").removesuffix(".")
            raise invalid_value(name, message) from error

    def _field_named(self, name: str) -> str:
        """The request's field for a name of `SamplingParams`."""
        return name


class GenerationFields(SamplingFields):
    """The fields that `/v1/chat/completions`, `/v1/completions` and `/v1/responses` share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    stop_token_ids: Annotated[list[_StopToken], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[int, _Bias], BeforeValidator(token_biases)] = Field(
        default_factory=dict
    )
    structured_outputs: StructuredOutputs = None
    prefix_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.include_usage and not self.stream:
            raise ValueError("stream_options: only allowed with `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the request's fields. Raises ApiError 400."""
        return self.sampling_of(defaults, {"structure": self.structure(), **self._own_sampling()})

    def structure(self) -> Structure | None:
        """The constraint on the text. Raises ApiError 400 if two fields specify it."""
        structures = [s for s in (self.structured_outputs, self._own_format()) if s is not None]
        if len(structures) > 1:
            other = structures[1].field.split(".")[0]
            raise invalid_value("structured_outputs", f"cannot be combined with `{other}`")
        return structures[0] if structures else None

    def _own_format(self) -> Structure | None:
        return None

    def _own_sampling(self) -> dict[str, Any]:
        raise NotImplementedError


class ToolGenerationFields(GenerationFields, ConversationBody):
    """The fields of both endpoints of OpenAI's API whose answers may think and call tools."""

    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None

    def turn(self) -> AssistantTurn:
        """The allowed contents of the answer. Raises ApiError 400."""
        return turn_of(
            self.definitions,
            self.tool_choice,
            parallel=self.parallel_tool_calls,
            thinking_budget=self.forced_budget,
        )
