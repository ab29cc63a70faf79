"""Chat messages as OpenAI spells them, with what other servers and their clients add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from mlxserve.api.bodies import spellings
from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, Id, Index, LongText
from mlxserve.api.bodies.request_body import StrictModel
from mlxserve.text.conversation import (
    Call,
    Conversation,
    Message,
    Part,
    SentPart,
    parts_of,
)

MAX_MESSAGES = 10_000
MAX_TOOL_CALLS = 128  # of one message


def _parts(value: object) -> object:
    return None if value is None else parts_of(spellings.parts(value))


def text_of(parts: Sequence[Part] | None) -> str | None:
    """The text of the parts, with stand-ins for images."""
    return None if parts is None else Message.from_parts("", parts).without_images().text


Parts: TypeAlias = Annotated[
    tuple[SentPart, ...] | None, PlainValidator(_parts), PlainSerializer(text_of)
]
_Reasoning: TypeAlias = Annotated[
    LongText | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)
]


# A text in OpenAI's APIs, an object in Ollama's.
Arguments: TypeAlias = Annotated[LongText, BeforeValidator(spellings.as_json)]


class ChatFunctionCall(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    arguments: Arguments | None = None
    index: Index | None = None


class ChatToolCall(StrictModel):
    id: Id | None = None
    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    function: ChatFunctionCall
    index: Index | None = None  # as in the stream that it came from

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        return spellings.nested_call(value)


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = None
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    tool_calls: (
        Annotated[list[ChatToolCall], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)] | None
    ) = None
    tool_call_id: Id | None = None
    reasoning_content: LongText | None = None
    reasoning: _Reasoning = None  # vLLM's and OpenRouter's name of the same
    refusal: LongText | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_today(cls, value: Any) -> Any:
        return spellings.chat_message(value)

    def message(self, where: str) -> Message:
        """Build the message. `developer` is the newer word for `system`."""
        return Message.from_parts(
            "system" if self.role == "developer" else self.role,
            self.content or (self.refusal or "",),
            where=f"{where}.content",
            reasoning=self.reasoning_content or self.reasoning or "",
            calls=tuple(
                Call(call.id or "", call.function.name, call.function.arguments or "")
                for call in self.tool_calls or ()
            ),
            call_id=self.tool_call_id,
            name=self.name,
        )


ChatMessages: TypeAlias = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


def conversation_of(messages: Sequence[ChatMessage], sees: bool = False) -> Conversation:
    """Build a conversation from messages.

    sees: as in `Conversation.from_messages`

    Raises InvalidParameter for media in the newest user message that the model cannot read.
    """
    read = (message.message(f"messages[{number}]") for number, message in enumerate(messages))
    return Conversation.from_messages(read, sees=sees)
