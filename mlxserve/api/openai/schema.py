"""The bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import PlainValidator, model_validator

from mlxserve.api.bodies.fields import LongText, Prompt, prompts
from mlxserve.api.bodies.generation import (
    GenerationFields,
    Logprobs,
    MaxTokens,
    ToolGenerationFields,
)
from mlxserve.api.bodies.messages import ChatMessages, conversation_of
from mlxserve.api.bodies.request_body import NotYet
from mlxserve.api.bodies.structured import ResponseFormat
from mlxserve.api.bodies.tools import Tools, definitions_of, left_out
from mlxserve.api.errors import ApiError
from mlxserve.core.sampling_params import Structure
from mlxserve.text.conversation import Conversation

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


class ChatRequest(ToolGenerationFields):
    """The body of `POST /v1/chat/completions`."""

    NOT_YET: ClassVar[NotYet] = {
        "audio": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "web_search_options": (),
    }
    IGNORED: ClassVar[NotYet] = {
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
    }

    messages: ChatMessages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    continue_final_message: bool | None = None  # vLLM's name: the answer continues the last message
    tools: Tools | None = None
    response_format: ResponseFormat = None

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> Self:
        last = self.messages[-1]
        if self.continue_final_message and not (last.role == "assistant" and last.content):
            raise ValueError(
                "continue_final_message: the last message must be the assistant's, with a text"
            )
        return self

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    def conversation(self, sees: bool = False) -> Conversation:
        return conversation_of(self.messages, sees)

    @cached_property
    def definitions(self) -> list[dict[str, Any]]:
        return definitions_of(self.tools)

    @property
    def unknown_fields(self) -> list[str]:
        kinds = (tool.type for tool in self.tools or () if tool.function is None)
        return [*super().unknown_fields, *left_out(kinds)]

    def _own_format(self) -> Structure | None:
        return self.response_format

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None:
            own["max_tokens"] = limit
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400, "top_logprobs: needs `logprobs: true` beside it.", param="top_logprobs"
            )
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return own

    def _field_named(self, name: str) -> str:
        return "top_logprobs" if name == "logprobs" else name


class CompletionRequest(GenerationFields):
    """The body of `POST /v1/completions`."""

    NOT_YET: ClassVar[NotYet] = {
        "best_of": (1,),
        "response_format": ({"type": "text"},),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(prompts)]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: LongText | None = None

    @model_validator(mode="after")
    def _echoes_no_middle(self) -> Self:
        if self.echo and self.suffix:
            raise ValueError("echo: a prompt with a suffix cannot be echoed; leave it out")
        return self

    def _own_sampling(self) -> dict[str, Any]:
        own: dict[str, Any] = {"max_tokens": self.max_tokens or COMPLETION_MAX_TOKENS}
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
        return own
