"""Chat messages as OpenAI spells them, turned into what a chat template expects."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, text
from mlxserve.api.bodies.request_body import StrictModel

MAX_MESSAGES = 10_000
MAX_TOOL_CALLS = 128  # of one message


class ChatFunctionCall(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    arguments: str


class ChatToolCall(StrictModel):
    """A call made by an earlier answer; it is passed to the chat template unchanged."""

    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(text)] = None
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    tool_calls: (
        Annotated[list[ChatToolCall], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)] | None
    ) = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
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


ChatMessages: TypeAlias = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]
