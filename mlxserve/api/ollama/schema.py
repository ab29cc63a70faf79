"""The bodies of Ollama's routes. Options that change nothing here are named in the reply's warning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import (
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    LongText,
    ModelName,
    Prompt,
    TokenId,
    prompts,
    stop_strings,
)
from mlxserve.api.bodies.generation import (
    NO_LIMIT,
    Penalty,
    RepetitionPenalty,
    SamplingFields,
    Seed,
    TopK,
)
from mlxserve.api.bodies.keep_alive import KeepAlive
from mlxserve.api.bodies.messages import MAX_MESSAGES, ChatMessage, conversation_of
from mlxserve.api.bodies.prompt_source import ConversationBody
from mlxserve.api.bodies.request_body import NotYet, RequestBody
from mlxserve.api.bodies.structured import FORMAT_TYPES, format_of
from mlxserve.api.bodies.tools import Tools, definitions_of, left_out, turn_of
from mlxserve.api.errors import ApiError
from mlxserve.api.model_names import ModelNames
from mlxserve.core.sampling_params import SamplingParams, Structure, StructureKind
from mlxserve.images.data_urls import data_url
from mlxserve.text.controls import SWITCH
from mlxserve.text.conversation import PARAGRAPH, Conversation, Message, SentImage
from mlxserve.text.parsing.turn import AssistantTurn

MAX_IMAGES = 1_000
MAX_CONTEXT = 2**20


def _format(value: object) -> Structure | None:
    if isinstance(value, dict) and value and value.get("type") not in FORMAT_TYPES:
        return Structure(StructureKind.JSON_SCHEMA, json.dumps(value), "format")
    if isinstance(value, dict) or value in (None, "", "json"):
        return format_of(value, "format")
    raise ValueError('must be "json" or a JSON schema')


def _seed(value: object) -> object:
    """Read a seed; a negative one means none."""
    value = int(value) if isinstance(value, float) else value
    return None if isinstance(value, int) and value < 0 else value


def _url(image: str) -> str:
    """Turn an image, which Ollama's clients send in base64, into a data: URL."""
    return image if image.startswith("data:") else data_url(image)


# Ollama drops the fraction of a number that should be whole.
_whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) else value)
# A number beyond these is none that means anything: tokens of an answer, or of a context.
_Int: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), _whole]
_Images: TypeAlias = Annotated[list[LongText], Field(fail_fast=True, max_length=MAX_IMAGES)]
_Texts: TypeAlias = Annotated[
    tuple[Prompt, ...],
    PlainValidator(lambda value: () if value in (None, "", []) else prompts(value)),
]


class OllamaOptions(SamplingFields):
    """The field `options`, with our extensions: clients send any option, but no other field."""

    num_predict: _Int | None = None
    num_ctx: _Int | None = None
    top_k: Annotated[TopK, _whole] | None = None
    seed: Annotated[Seed | None, BeforeValidator(_seed)] = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()

    def params(self, defaults: SamplingParams, **own: Any) -> SamplingParams:
        """The model's defaults, overridden by the options and by `own`. Raises ApiError 400."""
        limit = self.max_tokens if self.num_predict is None else self.num_predict
        if limit is not None:
            own["max_tokens"] = limit if 0 < limit < NO_LIMIT else NO_LIMIT
        if self.repeat_penalty is not None:
            own["repetition_penalty"] = self.repeat_penalty
        return self.sampling_of(defaults, own)

    def _field_named(self, name: str) -> str:
        names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
        return f"options.{names.get(name, name)}"


class OllamaRequest(RequestBody):
    """The fields that all bodies share. `name` is the older word for `model`."""

    IGNORED: ClassVar[NotYet] = {"insecure": (False,), "verbose": (False,)}

    name: ModelName | None = None
    stream: bool = True
    keep_alive: KeepAlive = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)

    @property
    def named_model(self) -> str:
        """The model's name. Raises ApiError 400 if there is none."""
        name = self.model or self.name
        if not name:
            raise ApiError(400, "model is required", param="model")
        return name

    def check_model(self, names: ModelNames) -> None:
        """Refuse any other name, strict or not: clients offer to download what is not found."""
        names.require(self.named_model)

    @property
    def unloads(self) -> bool:
        return self.keep_alive == 0


class OllamaEmbedRequest(OllamaRequest):
    """The body of `POST /api/embed`."""

    input: _Texts = ()
    prompt: _Texts = ()
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, le=MAX_DIMENSIONS)] | None = None

    @property
    def prompt_field(self) -> str:
        return "input"


class OllamaEmbeddingsRequest(OllamaEmbedRequest):
    """The body of the older `POST /api/embeddings`, whose text is `prompt`."""

    @property
    def prompt_field(self) -> str:
        return "prompt"


class OllamaMessage(ChatMessage):
    """A message, with Ollama's images and names of tools."""

    thinking: LongText | None = None
    images: _Images = Field(default_factory=list)
    tool_name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None

    def message(self, where: str) -> Message:
        message = super().message(where)
        place = f"{where}.images".lstrip(".")
        images = [
            SentImage(_url(image), "image", f"{place}[{n}]") for n, image in enumerate(self.images)
        ]
        shown = message.after(Message.from_parts(message.role, images, PARAGRAPH))
        return replace(
            message,
            text=shown.text,
            images=shown.images,
            reasoning=self.thinking or message.reasoning,
            name=self.tool_name or message.name,
        )


class OllamaGeneration(OllamaRequest, ConversationBody):
    """The fields that `/api/chat` and `/api/generate` share."""

    NOT_YET: ClassVar[NotYet] = {"template": ()}
    IGNORED: ClassVar[NotYet] = {"shift": (False,), "truncate": (False,)}

    tools: Tools | None = None
    format: Annotated[Structure | None, PlainValidator(_format)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=SamplingParams.MAX_LOGPROBS)] | None = None

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return definitions_of(self.tools)

    @property
    def unknown_fields(self) -> list[str]:
        kinds = (tool.type for tool in self.tools or () if tool.function is None)
        return [*super().unknown_fields, *left_out(kinds)]

    @property
    def thinks(self) -> bool:
        """True if the request turns thinking on."""
        return bool(self.template_kwargs.get(SWITCH))

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the request's fields. Raises ApiError 400."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.options.params(defaults, structure=self.format, logprobs=logprobs)

    def turn(self) -> AssistantTurn:
        return turn_of(self.definitions, None, parallel=None, thinking_budget=self.forced_budget)


class OllamaChatRequest(OllamaGeneration):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = (
        Field(default_factory=list)
    )

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    @property
    def continues(self) -> bool:
        """True if the last message is the assistant's, which the answer then continues."""
        last = self.messages[-1]
        return last.role == "assistant" and bool(last.content) and not last.tool_calls

    def conversation(self, sees: bool = False) -> Conversation:
        """Read the conversation. `sees` and errors are those of `conversation_of`."""
        return conversation_of(self.messages, sees)


class OllamaGenerateRequest(OllamaGeneration):
    """The body of `POST /api/generate`."""

    prompt: LongText | None = None
    suffix: LongText | None = None
    system: LongText | None = None
    context: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_CONTEXT)] | None = None
    raw: bool | None = None
    images: _Images = Field(default_factory=list)

    @model_validator(mode="after")
    def _raw_is_alone(self) -> Self:
        if self.raw and (self.system or self.context):
            raise ValueError("raw: raw mode does not support template, system, or context")
        return self

    @property
    def num_messages(self) -> int:
        return 2

    def conversation(self, sees: bool = False) -> Conversation:
        """Read both as a conversation. Raises InvalidParameter for images that the model cannot see."""
        system = [Message(role="system", text=self.system)] if self.system else []
        message = {"role": "user", "content": self.prompt, "images": self.images}
        return Conversation.from_messages(
            [*system, OllamaMessage.model_validate(message).message("")], sees=sees
        )
