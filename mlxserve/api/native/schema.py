"""The bodies of our own endpoints: prefixes, tokenization and the size of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import LongText, Prompt, TokenId, prompts
from mlxserve.api.bodies.messages import ChatMessage, ChatMessages, conversation_of
from mlxserve.api.bodies.prompt_source import PromptSource
from mlxserve.api.bodies.request_body import RequestBody
from mlxserve.api.bodies.thinking import ThinkingFields
from mlxserve.core.config import MAX_PAGES, MIN_PAGES
from mlxserve.core.errors import InvalidParameter
from mlxserve.text.conversation import Conversation

MAX_DETOKENIZED = 2**20


class _PromptOrMessages(ThinkingFields):
    """A body with a text, or with a conversation that the model's chat template renders."""

    prompt: object = None
    messages: ChatMessages | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either `prompt` or `messages`")
        return self

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.messages is None else "messages"


class TokenizeRequest(_PromptOrMessages):
    """The body of `POST /tokenize`."""

    prompt: LongText | None = None
    add_generation_prompt: bool = True

    def prompt_source(self) -> PromptSource:
        """The source from which the messages become a prompt."""
        return PromptSource(
            read=partial(conversation_of, self.messages or ()),
            num_messages=len(self.messages or ()),
            template_kwargs=self.template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
        )


class PrefixRequest(_PromptOrMessages):
    """The body of `PUT /v1/prefixes/{name}`: text, token ids, or the start of a conversation."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(prompts)] | None = None

    @model_validator(mode="after")
    def _is_one_prompt(self) -> Self:
        if self.prompt is not None and len(self.prompt) > 1:
            raise ValueError("prompt: a prefix is one text or one list of token ids")
        return self

    def prompt_source(self) -> PromptSource:
        """The source from which the messages become the beginning of a prompt."""
        return PromptSource(
            read=partial(_without_files, self.messages or ()),
            num_messages=len(self.messages or ()),
            template_kwargs=self.template_kwargs,
            add_generation_prompt=False,
        )


def _without_files(messages: Sequence[ChatMessage], sees: bool) -> Conversation:
    """Raises InvalidParameter for an image or a document."""
    conversation = conversation_of(messages, sees)
    for image in conversation.sent_images:
        raise InvalidParameter(image.where, "a named prefix holds no images")
    for document in conversation.sent_documents:
        raise InvalidParameter(
            document.where, "a named prefix holds no files; give the text of the document"
        )
    return conversation


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    tokens: Annotated[
        list[TokenId],
        Field(fail_fast=True, max_length=MAX_DETOKENIZED),
    ]


class CacheResizeRequest(RequestBody):
    """The body of `POST /api/v1/cache/resize`."""

    # `Writer` checks the bounds; here they only appear in /openapi.json.
    num_pages: Annotated[int, Field(json_schema_extra={"minimum": MIN_PAGES, "maximum": MAX_PAGES})]
