"""What a client may ask: each request body as a model, validated once, with errors that name a field.

Three kinds of fields exist and none is dropped in silence. Known ones are checked here or by
`SamplingParams`. Those OpenAI knows and we do not support yet are refused unless they ask for
nothing (`best_of: 1`). Unknown ones are collected, so that the reply can say that they did nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    model_validator,
)

from mlxserve.api.bodies.fields import (
    MAX_NAME_LENGTH,
    Prompt,
    prompts,
    stop_strings,
    template_kwargs,
    text,
    token_biases,
)
from mlxserve.api.bodies.request_body import Body, NotYet, Strict, sampling_params
from mlxserve.api.bodies.structured import ResponseFormat, StructuredOutputs
from mlxserve.api.bodies.tools import (
    Budget,
    Effort,
    ToolChoiceField,
    Tools,
    thinking_budget,
    thinking_kwargs,
    turn_of,
)
from mlxserve.api.errors import ApiError
from mlxserve.request import MAX_PAGES, MIN_PAGES
from mlxserve.sampling_params import SamplingParams, Structure
from mlxserve.text.parsing.turn import AssistantTurn

MAX_MESSAGES = 10_000
MAX_CHOICES = 8
MAX_MAX_TOKENS = 2**31 - 1
MAX_DETOKENIZED = 2**20
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


class Function(Strict):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    arguments: str


class ToolCall(Strict):
    """A call an earlier answer made; it reaches the chat template as it is."""

    id: str
    type: Literal["function"]
    function: Function


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(text)] = None
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs `content`")
        return self

    def for_template(self) -> dict[str, Any]:
        """As a chat template expects it: `developer` is the newer word for `system`."""
        message = self.model_dump(exclude_none=True, exclude=set(self.model_extra or ()))
        message["content"] = self.content or self.refusal or ""
        message.pop("refusal", None)
        if self.role == "developer":
            message["role"] = "system"
        return message


Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]
TemplateKwargs: TypeAlias = Annotated[dict[str, bool | str], PlainValidator(template_kwargs)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Generation(Body):
    """The fields both endpoints share. Ranges are `SamplingParams`'s; types are checked here."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_MAX_TOKENS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(token_biases)] = Field(
        default_factory=dict
    )
    structured_outputs: StructuredOutputs = None
    prefix_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0

    @model_validator(mode="after")
    def _streams_what_it_describes(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults with what was asked. Raises ApiError 400."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        given["structure"] = self.structure()
        return sampling_params(defaults, {**given, **self._own_sampling()}, self._field_named)

    def structure(self) -> Structure | None:
        """What the text has to match. Raises ApiError 400 where it is said twice."""
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


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


class ChatRequest(Generation):
    """The body of `POST /v1/chat/completions`."""

    NOT_YET: ClassVar[NotYet] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "prompt_cache_options": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    continue_final_message: bool = False  # vLLM's name: the answer goes on where the last one ends
    tools: Tools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: Budget | None = None
    response_format: ResponseFormat = None

    @model_validator(mode="after")
    def _ends_with_what_is_continued(self) -> Self:
        last = self.messages[-1]
        if self.continue_final_message and not (last.role == "assistant" and last.content):
            raise ValueError(
                "continue_final_message: the last message must be the assistant's, with a text"
            )
        return self

    def _own_format(self) -> Structure | None:
        return self.response_format

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """Of the tools, as chat templates know them."""
        return [tool.definition() for tool in self.tools or ()]

    @property
    def template_kwargs(self) -> dict[str, bool | str]:
        return thinking_kwargs(self.reasoning_effort, self.chat_template_kwargs)

    def turn(self) -> AssistantTurn:
        """Raises ApiError 400."""
        return turn_of(
            self.definitions,
            self.tool_choice,
            parallel=self.parallel_tool_calls,
            thinking_budget=thinking_budget(self.thinking_budget, self.template_kwargs),
        )

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None:
            own["max_tokens"] = limit
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(
                400, "top_logprobs: needs `logprobs: true` beside it.", param="top_logprobs"
            )
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return own

    def _field_named(self, name: str) -> str:
        return "top_logprobs" if name == "logprobs" else name


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: text, or a conversation as its template renders it."""

    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either `prompt` or `messages`")
        return self

    @property
    def text_field(self) -> str:
        return "messages" if self.prompt is None else "prompt"


class PrefixRequest(Body):
    """The body of `PUT /v1/prefixes/{name}`: text, token ids, or the start of a conversation."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(prompts)] | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either `prompt` or `messages`")
        if self.prompt is not None and len(self.prompt) > 1:
            raise ValueError("prompt: a prefix is one text or one list of token ids")
        return self

    @property
    def text_field(self) -> str:
        return "messages" if self.prompt is None else "prompt"


class CacheResizeRequest(Body):
    """The body of `POST /api/v1/cache/resize`."""

    # `Chat` checks the bounds; here they are only told to readers of the API's description.
    num_pages: Annotated[int, Field(json_schema_extra={"minimum": MIN_PAGES, "maximum": MAX_PAGES})]


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
        Field(fail_fast=True, max_length=MAX_DETOKENIZED),
    ]


class CompletionRequest(Generation):
    """The body of `POST /v1/completions`."""

    NOT_YET: ClassVar[NotYet] = {
        "best_of": (None, 1),
        "echo": (None, False),
        "response_format": (None, {"type": "text"}),
        "suffix": (None, ""),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(prompts)]
    logprobs: int | None = None

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {"max_tokens": self.max_tokens or COMPLETION_MAX_TOKENS}
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
        return own
