"""The bodies of Anthropic's routes, read as a conversation.

Kinds of blocks that this server cannot read, of which agents send many, become a short text, and the
reply's warning header names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH, LongText, stop_strings
from mlxserve.api.bodies.generation import MaxTokens, SamplingFields
from mlxserve.api.bodies.messages import MAX_MESSAGES
from mlxserve.api.bodies.prompt_source import ConversationBody
from mlxserve.api.bodies.request_body import KindedModel, NotYet, StrictModel
from mlxserve.api.bodies.spellings import anthropic_tool
from mlxserve.api.bodies.structured import OutputFormat
from mlxserve.api.bodies.thinking import Effort, ThinkingOptions, thinking_options
from mlxserve.api.bodies.tools import Name, ToolChoiceField, definition_of, turn_of
from mlxserve.api.model_names import ModelNames
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.data_urls import data_url
from mlxserve.text.conversation import (
    ASSISTANT,
    PARAGRAPH,
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
from mlxserve.text.documents.sent import sent_document
from mlxserve.text.parsing.turn import AssistantTurn
from mlxserve.text.signature import signed_thinking

MAX_BLOCKS = 1_000
MAX_TOOLS = 1_000
# Claude Code begins its system prompt with a line whose hash changes with each request. Left in, it
# would make every prompt differ from the previous one at its start: no page would ever be reused.
BILLING_LINE = "x-anthropic-billing-header:"
_NOT_TEXT = frozenset({"thinking", "redacted_thinking", "tool_use", "tool_result"})


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(StrictModel):
    """A block of text. `cache_control` has no effect: every prompt is cached."""

    type: Literal["text"]
    text: LongText
    cache_control: object = None
    citations: object = None


class ContentBlock(KindedModel):
    """A block of any kind, which has some of the fields. Unknown kinds keep only their type."""

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": (),
        "image": (),
        "document": (),
        "thinking": (),
        "tool_use": ("name",),
        "tool_result": (),
    }

    text: LongText | None = None
    source: dict[str, Any] | None = None
    title: LongText | None = None
    context: LongText | None = None
    thinking: LongText | None = None
    signature: LongText | None = None
    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    content: _Blocks = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: object = None
    citations: object = None
    caller: object = None

    def parts(self, where: str) -> Iterator[Part]:
        """Yield the block's text, or a stand-in for unreadable content.

        Yields nothing for thinking and calls, which are not part of a text.
        """
        if self.type == "text":
            yield self.text or ""
        elif self.type == "image":
            yield SentImage(self._image_url(), self.type, where)
        elif self.type == "document":
            block = {"type": self.type, "title": self.title, "source": self.source}
            yield sent_document(block, where) or Unreadable(self.type, where)
            if self.context:
                yield self.context
        elif self.type not in _NOT_TEXT:
            yield Unreadable(self.type, where)

    def _image_url(self) -> str | None:
        source = self.source or {}
        data, url = source.get("data"), source.get("url")
        if source.get("type") == "base64" and isinstance(data, str):
            return data_url(data, str(source.get("media_type") or ""))
        return url if source.get("type") == "url" and isinstance(url, str) else None

    def result(self, where: str) -> Message:
        """The block as a tool's message. Templates have no field for a failure, so the text states it."""
        parts = _parts(self.content, f"{where}.content")
        if self.is_error:
            first, *rest = parts if parts and isinstance(parts[0], str) else ("", *parts)
            parts = [f"Error: {first}", *rest]
        return Message.from_parts(TOOL, parts, PARAGRAPH, call_id=self.tool_use_id)

    def call(self) -> Call:
        return Call(self.id or "", self.name or "", arguments_text(self.input))


_Blocks: TypeAlias = Annotated[
    list[ContentBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)
]


def _parts(blocks: Sequence[ContentBlock], where: str) -> list[Part]:
    return [part for n, block in enumerate(blocks) for part in block.parts(f"{where}[{n}]")]


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: _Blocks = Field(default_factory=list)

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        for block in self.content:
            if block.type in ("tool_use", "thinking") and self.role != "assistant":
                raise ValueError(f"a {self.role} message cannot hold a {block.type} block")
            if block.type == "tool_result" and self.role != "user":
                raise ValueError(f"a {self.role} message cannot hold a tool_result block")
        return self

    def messages(self, where: str) -> Iterator[Message]:
        """Yield the message as one or more: each tool result is a message of its own."""
        if self.role == "assistant":
            yield self._answer(where)
            return
        parts: list[Part] = []
        for number, block in enumerate(self.content):
            place = f"{where}.content[{number}]"
            parts += block.parts(place)
            if block.type == "tool_result":
                if parts:
                    yield Message.from_parts(self.role, parts, PARAGRAPH)
                yield block.result(place)
                parts = []
        if parts:
            yield Message.from_parts(self.role, parts, PARAGRAPH)

    def _answer(self, where: str) -> Message:
        """Join the blocks of an answer without a separator: they are pieces of one text."""
        return Message.from_parts(
            ASSISTANT,
            _parts(self.content, f"{where}.content"),
            reasoning="".join(b.thinking or signed_thinking(b.signature) for b in self.content),
            calls=tuple(block.call() for block in self.content if block.type == "tool_use"),
        )


class AnthropicTool(StrictModel):
    """A tool run by the client. Anthropic's server tools, which have a type and no schema, are left out."""

    name: Name | None = None
    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None
    cache_control: object = None
    description: LongText | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: arguments always follow the schema

    @model_validator(mode="before")
    @classmethod
    def _with_its_schema(cls, value: Any) -> Any:
        return anthropic_tool(value)

    @model_validator(mode="after")
    def _has_its_name(self) -> Self:
        if self.is_callable and self.name is None:
            raise ValueError("a tool needs a `name`")
        return self

    @property
    def is_callable(self) -> bool:
        return self.input_schema is not None or self.type in (None, "custom", "function")

    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's format, which chat templates expect."""
        return definition_of(self.name or "", self.description, self.input_schema)


class AnthropicThinking(ThinkingOptions):
    display: Annotated[str, Field(max_length=MAX_NAME_LENGTH)] | None = None


class OutputConfig(StrictModel):
    effort: Effort = None
    format: OutputFormat = None


class CountTokensRequest(ConversationBody):
    """The body of `POST /v1/messages/count_tokens`: the fields that become part of the prompt."""

    NOT_YET: ClassVar[NotYet] = {
        "container": (),
        "fallbacks": (),
        "mcp_servers": (),
        "output_format": (),
    }
    IGNORED: ClassVar[NotYet] = {"service_tier": ("auto", "standard_only")}

    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Annotated[
        list[TextBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)
    ] = Field(default_factory=list)
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField = None
    thinking: Annotated[AnthropicThinking | None, BeforeValidator(thinking_options)] = None
    output_config: OutputConfig | None = None
    cache_control: object = None

    def check_model(self, names: ModelNames) -> str | None:
        """Accept any name of Anthropic's models, the only ones its clients know, as the served model."""
        return names.check(self.model, is_anthropic=True)

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message: a text of the assistant's, and nothing else."""
        last = self.messages[-1]
        is_text = bool(last.content) and all(block.type == "text" for block in last.content)
        return last.role == "assistant" and is_text

    @property
    def unknown_fields(self) -> list[str]:
        tools = {str(tool.type) for tool in self.tools or () if not tool.is_callable}
        return [*super().unknown_fields, *(f"the tool {kind}" for kind in sorted(tools))]

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def conversation(self, sees: bool = False) -> Conversation:
        """Read the conversation; consecutive messages of one role are merged.

        `sees` and errors are those of `conversation_of`.
        """
        system = _without_billing_line(PARAGRAPH.join(block.text for block in self.system))
        messages = [
            each
            for number, message in enumerate(self.messages)
            for each in message.messages(f"messages[{number}]")
        ]
        first = [Message(role=SYSTEM, text=system)] if system else []
        return Conversation.from_messages([*first, *messages], joins=(USER, SYSTEM), sees=sees)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.definition() for tool in self.tools or () if tool.is_callable]

    def turn(self) -> AssistantTurn:
        """The allowed contents of the answer. Raises ApiError 400."""
        return turn_of(
            self.definitions,
            self.tool_choice,
            parallel=None,
            thinking_budget=self.forced_budget,
        )

    @property
    def effort(self) -> str | None:
        own = self.output_config.effort if self.output_config else None
        return own or super().effort

    @property
    def switch(self) -> bool | None:
        """Thinking is off by default, as with Anthropic's own models, unless another API's effort is sent."""
        switch = super().switch
        return False if switch is None and super().effort is None else switch


class MessagesRequest(CountTokensRequest, SamplingFields):
    """The body of `POST /v1/messages`."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[tuple[str, ...], PlainValidator(stop_strings)] = ()

    @model_validator(mode="after")
    def _leaves_room_for_the_answer(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking: budget_tokens must be below max_tokens")
        return self

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the request's fields. Raises ApiError 400."""
        own = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "structure": self.output_config.format if self.output_config else None,
        }
        return self.sampling_of(defaults, own)

    def _field_named(self, name: str) -> str:
        return "stop_sequences" if name == "stop" else name


def _without_billing_line(system: str) -> str:
    if not system.startswith(BILLING_LINE):
        return system
    return system.partition("\n")[2].lstrip("\n")
