"""The body of `/v1/responses`: input items, read as a conversation, and tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, Id, LongText
from mlxserve.api.bodies.generation import NO_LIMIT, MaxTokens, ToolGenerationFields
from mlxserve.api.bodies.messages import MAX_MESSAGES, Arguments, Parts, text_of
from mlxserve.api.bodies.request_body import KindedModel, NotYet, StrictModel
from mlxserve.api.bodies.spellings import flat_tool, input_items
from mlxserve.api.bodies.structured import format_of
from mlxserve.api.bodies.tools import MAX_TOOLS, Name, definition_of, left_out
from mlxserve.api.errors import invalid_value
from mlxserve.api.responses.items import ToolAddress
from mlxserve.core.sampling_params import Structure
from mlxserve.text.conversation import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Call,
    Conversation,
    Message,
    Part,
    SentImage,
    Unreadable,
    arguments_text,
)
from mlxserve.text.documents.sent import SentDocument
from mlxserve.text.signature import signed_thinking

MAX_INCLUDED = 256
_FILES = (SentImage, SentDocument)
_SIGNED = "reasoning.encrypted_content"  # of `include`


class InputItem(KindedModel):
    """A message, a call, the output of a call, or reasoning.

    Each kind has some of the fields. Any other kind, such as a call of OpenAI's own tools, keeps
    only its type and id.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "message": ("role",),
        "function_call": ("name",),
        "function_call_output": (),
        "custom_tool_call": ("name",),
        "custom_tool_call_output": (),
        "reasoning": (),
    }

    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] = "message"
    id: Id | None = None
    status: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = None
    call_id: Id | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    namespace: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    arguments: Arguments | None = None
    input: LongText | None = None
    output: Parts = None
    summary: Annotated[list[Any], Field(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: LongText | None = None

    @property
    def call(self) -> Call:
        """The item as a call. A custom tool's text becomes its only argument."""
        is_custom = self.type == "custom_tool_call"
        arguments = arguments_text({"input": self.input or ""}) if is_custom else self.arguments
        tool = ToolAddress(self.name or "", self.namespace)
        return Call(self.call_id or "", tool.full_name, arguments or "")

    @property
    def reasoning(self) -> str:
        """The text of reasoning, also if the client stored it unread, as a signature."""
        return text_of(self.content) or signed_thinking(self.encrypted_content)

    def message(self, where: str) -> Message:
        """The item as a message of its own."""
        if self.type in ("function_call_output", "custom_tool_call_output"):
            return Message.from_parts(
                TOOL, self.output or (), where=f"{where}.output", call_id=self.call_id
            )
        if self.type != "message":
            role = ASSISTANT if self.type.endswith("_call") else USER
            return Message.from_parts(role, (Unreadable(self.type, where),))
        role = SYSTEM if self.role == "developer" else str(self.role)
        return Message.from_parts(role, self.content or (), where=f"{where}.content")

    @property
    def size(self) -> int:
        """Number of characters, including images and documents."""
        parts = (*(self.content or ()), *(self.output or ()))
        return len(self.model_dump_json()) + sum(map(_file_size, parts))

    def listed(self, number: int) -> dict[str, Any]:
        """Render the item for a list of inputs. An item without an id is named by its position."""
        item = self.model_dump(exclude_none=True, exclude=set(self.model_extra or ()))
        item.setdefault("id", f"{_ID_PREFIXES.get(self.type, self.type)}_{number}")
        if self.type == "reasoning":
            item.setdefault("summary", [])
        if self.content is not None:
            of_message = "output_text" if self.role == "assistant" else "input_text"
            kind = "reasoning_text" if self.type == "reasoning" else of_message
            item["content"] = _listed_parts(self.content, kind)
        if any(isinstance(part, _FILES) for part in self.output or ()):
            item["output"] = _listed_parts(self.output or (), "input_text")
        item.setdefault("status", "completed")
        return item


def _file_size(part: Part) -> int:
    if isinstance(part, SentImage):
        return len(part.source or "")
    return part.num_characters if isinstance(part, SentDocument) else 0


def _listed_file(part: Part) -> dict[str, Any]:
    if isinstance(part, SentDocument):
        return {"type": "input_file", "filename": part.name, "file_data": part.as_url()}
    assert isinstance(part, SentImage)
    return {"type": "input_image", "detail": "auto", "image_url": part.source}


def _listed_parts(parts: Sequence[Part], kind: str) -> list[dict[str, Any]]:
    """Render files as they were sent, and each text between them as one part of this kind."""
    listed: list[dict[str, Any]] = []
    for is_file, run in groupby(parts, lambda part: isinstance(part, _FILES)):
        if is_file:
            listed += map(_listed_file, run)
        else:
            annotated: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            listed.append({"type": kind, "text": text_of(tuple(run)), **annotated})
    return listed or [{"type": kind, "text": ""}]


_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """Read messages, merging an answer's reasoning, text and calls into one."""
    messages: list[Message] = []
    reasoning = ""
    for number, item in enumerate(items):
        if item.type == "reasoning":
            reasoning += item.reasoning
        elif item.type in ("function_call", "custom_tool_call"):
            if not messages or messages[-1].role != ASSISTANT or reasoning:
                messages.append(Message(role=ASSISTANT, reasoning=reasoning))
                reasoning = ""
            messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, item.call))
        else:
            message = item.message(f"input[{number}]")
            if message.role == ASSISTANT:
                message = replace(message, reasoning=reasoning)
                reasoning = ""
            elif reasoning and message.role == USER:
                # An answer that was stopped while it thought.
                messages.append(Message(role=ASSISTANT, reasoning=reasoning))
                reasoning = ""
            messages.append(message)
    return [*messages, Message(role=ASSISTANT, reasoning=reasoning)] if reasoning else messages


class ResponsesTool(StrictModel):
    """A function, a custom tool, or a namespace of them. Tools that OpenAI runs are left out."""

    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] = "function"
    name: Name | None = None
    description: LongText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        return flat_tool(value)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.is_known and self.name is None:
            raise ValueError(f"a {self.type} tool needs a `name`")
        if self.type == "namespace" and not self.tools:
            raise ValueError("a namespace needs `tools`")
        if self.type == "namespace" and any(not tool.is_callable for tool in self.tools or ()):
            raise ValueError("a namespace may only contain tools of the types function and custom")
        return self

    @property
    def is_callable(self) -> bool:
        return self.type in ("function", "custom")

    @property
    def is_known(self) -> bool:
        return self.is_callable or self.type == "namespace"

    def addressed(self) -> Iterator[tuple[ToolAddress, ResponsesTool]]:
        """Yield the callable tools: this one, or those of this namespace.

        The first tool of a namespace gets its description as well.
        """
        if self.is_callable:
            yield ToolAddress(self.name or "", is_custom=self.type == "custom"), self
        for number, tool in enumerate(self.tools or () if self.type == "namespace" else ()):
            texts = [text for text in (number == 0 and self.description, tool.description) if text]
            update = {"description": "\n".join(texts) or None}
            address = ToolAddress(tool.name or "", self.name, tool.type == "custom")
            yield address, tool.model_copy(update=update)

    def definition(self, name: str) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        parameters = _TEXT_INPUT if self.type == "custom" else self.parameters
        return definition_of(name, self.description, parameters)


_TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    format_of(value, "text.format")
    return value


class TextOptions(StrictModel):
    format: Annotated[dict[str, Any] | None, AfterValidator(_format)] = None
    verbosity: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None  # without effect


class ResponsesRequest(ToolGenerationFields):
    """The body of `POST /v1/responses`. Sampling fields that OpenAI's API lacks are extensions."""

    NOT_YET: ClassVar[NotYet] = {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "n": (1,),
        "prompt": (),
        "prompt_cache_options": (),
        "top_logprobs": (0,),
    }
    IGNORED: ClassVar[NotYet] = {
        "context_management": (),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[InputItem],
        Field(fail_fast=True, max_length=MAX_MESSAGES),
        BeforeValidator(input_items),
    ] = Field(default_factory=list)
    instructions: LongText | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    store: bool | None = None
    include: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_NAME_LENGTH)]], Field(max_length=MAX_INCLUDED)
        ]
        | None
    ) = None
    max_output_tokens: MaxTokens | None = None
    metadata: dict[str, Id] | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    text: TextOptions | None = None

    @property
    def unknown_fields(self) -> list[str]:
        others = {*(self.include or ())} - {_SIGNED}
        has_verbosity = self.text is not None and self.text.verbosity not in (None, "medium")
        return [
            *super().unknown_fields,
            *(["text.verbosity"] if has_verbosity else ()),
            *(f"include of {name}" for name in sorted(others)),
            *left_out(tool.type for tool in self.tools or () if not tool.is_known),
        ]

    @property
    def signs_reasoning(self) -> bool:
        """True if the client stores reasoning unread, and sends it back."""
        return _SIGNED in (self.include or ())

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in the format of chat templates. Raises ApiError 400."""
        callable_tools = self._callable_tools()
        if len(callable_tools) > MAX_TOOLS:
            raise invalid_value(
                "tools",
                f"{len(callable_tools)} are in all namespaces; at most {MAX_TOOLS} are allowed",
            )
        return [tool.definition(address.full_name) for address, tool in callable_tools]

    @property
    def addresses(self) -> dict[str, ToolAddress]:
        """The client's address of each tool, by the model's name for it."""
        return {address.full_name: address for address, _ in self._callable_tools()}

    def _callable_tools(self) -> list[tuple[ToolAddress, ResponsesTool]]:
        return [addressed for tool in self.tools or () for addressed in tool.addressed()]

    def echo(self) -> dict[str, Any]:
        """The fields of the request that the reply repeats."""
        choice, max_tokens = self.tool_choice, self.max_output_tokens
        return {
            "max_output_tokens": None if max_tokens == NO_LIMIT else max_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": "auto" if choice is None else choice.sent,
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or ()],
        }

    @property
    def referenced(self) -> list[str]:
        """Ids of stored items in the input."""
        return [item.id for item in self.input if item.type == "item_reference" and item.id]

    def with_items(self, stored: Mapping[str, InputItem]) -> Self:
        """Replace references to stored items by the items."""
        if not stored:
            return self
        items = [
            stored.get(item.id or "", item) if item.type == "item_reference" else item
            for item in self.input
        ]
        return self.model_copy(update={"input": items})

    def after(self, earlier: Sequence[InputItem]) -> Self:
        """Prepend an earlier conversation. Raises ApiError 400."""
        if len(earlier) + len(self.input) > MAX_MESSAGES:
            raise invalid_value("input", f"the conversation has more than {MAX_MESSAGES} items")
        return self.model_copy(update={"input": [*earlier, *self.input]})

    @property
    def prompt_field(self) -> str:
        return "input"

    @property
    def num_messages(self) -> int:
        return len(self.input)

    def conversation(self, sees: bool = False) -> Conversation:
        if not self.input and not self.instructions:
            raise invalid_value("input", "is empty; send a text or a list of items")
        first = [Message(role=SYSTEM, text=self.instructions)] if self.instructions else []
        return Conversation.from_messages([*first, *messages_of(self.input)], sees=sees)

    def _own_format(self) -> Structure | None:
        return format_of(self.text.format, "text.format") if self.text is not None else None

    def _own_sampling(self) -> dict[str, Any]:
        limit = self.max_output_tokens or self.max_tokens
        return {} if limit is None else {"max_tokens": limit}

    def _field_named(self, name: str) -> str:
        return "max_output_tokens" if name == "max_tokens" else name
