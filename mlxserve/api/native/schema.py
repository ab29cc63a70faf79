"""The bodies of our own endpoints: prefixes, tokenization and the size of the cache."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import Prompt, prompts
from mlxserve.api.bodies.generation import TemplateKwargsField
from mlxserve.api.bodies.messages import ChatMessages
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.core.config import MAX_PAGES, MIN_PAGES

MAX_DETOKENIZED = 2**20


class _PromptOrMessages(RequestBody):
    """A text, or a conversation as the model's chat template renders it."""

    prompt: object = None
    messages: ChatMessages | None = None
    chat_template_kwargs: TemplateKwargsField = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either `prompt` or `messages`")
        return self

    @property
    def text_field(self) -> str:
        return "prompt" if self.messages is None else "messages"


class TokenizeRequest(_PromptOrMessages):
    """The body of `POST /tokenize`."""

    prompt: str | None = None
    add_generation_prompt: bool = True


class PrefixRequest(_PromptOrMessages):
    """The body of `PUT /v1/prefixes/{name}`: text, token ids, or the start of a conversation."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(prompts)] | None = None

    @model_validator(mode="after")
    def _is_one_prompt(self) -> Self:
        if self.prompt is not None and len(self.prompt) > 1:
            raise ValueError("prompt: a prefix is one text or one list of token ids")
        return self


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
        Field(fail_fast=True, max_length=MAX_DETOKENIZED),
    ]


class CacheResizeRequest(RequestBody):
    """The body of `POST /api/v1/cache/resize`."""

    # `Writer` checks the bounds; here they only appear in /openapi.json.
    num_pages: Annotated[int, Field(json_schema_extra={"minimum": MIN_PAGES, "maximum": MAX_PAGES})]
