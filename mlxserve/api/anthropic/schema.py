"""The bodies of Anthropic's routes, and their conversation as a chat template expects it.

Images and files are refused: an answer without them would be about something else. Unknown kinds of
blocks, of which agents send many, are left out, and the reply's warning header names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from mlxserve.api.bodies.fields import MAX_NAME_LENGTH
from mlxserve.api.bodies.generation import sampling_params
from mlxserve.api.bodies.request_body import NotYet, RequestBody, StrictModel
from mlxserve.api.bodies.structured import OutputFormat
from mlxserve.api.bodies.tools import ChosenTools, Name, thinking_budget, turn_of
from mlxserve.sampling_params import SamplingParams
from mlxserve.text.parsing.turn import AssistantTurn, ToolChoice

MAX_MESSAGES = 10_000
MAX_BLOCKS = 1_000
MAX_TOOLS = 1_000
MAX_MAX_TOKENS = 2**31 - 1
MIN_THINKING_BUDGET = 1_024
# Claude Code begins its system prompt with a line whose hash changes with each request. Left in, it
# would make every prompt differ from the previous one at its start: no page would ever be reused.
BILLING_LINE = "x-anthropic-billing-header:"
_SEPARATOR = "\n\n"  # between blocks of text: each is a paragraph
_UNREADABLE = ("image", "file", "container_upload")
_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_on_repetition",
)


class _Block(StrictModel):
    """cache_control: without effect, since every prompt is cached."""

    cache_control: object = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: object = None


class _TextSource(StrictModel):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(_Block):
    """A plain-text document; others are refused by the type of their source."""

    type: Literal["document"]
    source: _TextSource
    title: str | None = None
    context: str | None = None
    citations: object = None

    @property
    def text(self) -> str:
        parts = (self.title, self.context, self.source.data)
        return _SEPARATOR.join(part for part in parts if part)


class ThinkingBlock(_Block):
    """The thinking of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    input: dict[str, Any]
    caller: object = None

    def for_template(self) -> dict[str, Any]:
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class UnreadableBlock(StrictModel):
    type: str

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise ValueError(f"{self.type} blocks are not supported: this server reads text only")


class UnknownBlock(StrictModel):
    """Left out; `unknown_fields` names its type."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    type: Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


def _kinds(*known: str) -> Discriminator:
    def kind_of(block: object) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        if kind in known:
            return str(kind)
        return "media" if kind in _UNREADABLE else "block"

    return Discriminator(kind_of)


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_Text: TypeAlias = Annotated[TextBlock, Tag("text")]
_Document: TypeAlias = Annotated[DocumentBlock, Tag("document")]
_Unreadable: TypeAlias = Annotated[UnreadableBlock, Tag("media")]
_Other: TypeAlias = Annotated[UnknownBlock, Tag("block")]
_ResultBlock: TypeAlias = Annotated[
    _Text | _Document | _Unreadable | _Other, _kinds("text", "document")
]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    content: Annotated[
        list[_ResultBlock],
        Field(fail_fast=True, max_length=MAX_BLOCKS),
        BeforeValidator(_as_blocks),
    ] = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """Templates have no field for a failure, so the text states it."""
        text = _texts(self.content, _SEPARATOR)
        return f"Error: {text}" if self.is_error else text


_Blocks: TypeAlias = Annotated[
    list[
        Annotated[
            _Text
            | _Document
            | Annotated[ThinkingBlock, Tag("thinking")]
            | Annotated[ToolUseBlock, Tag("tool_use")]
            | Annotated[ToolResultBlock, Tag("tool_result")]
            | _Unreadable
            | _Other,
            _kinds("text", "document", "thinking", "tool_use", "tool_result"),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
    BeforeValidator(_as_blocks),
]


def _texts(blocks: Sequence[object], separator: str) -> str:
    return separator.join(
        block.text for block in blocks if isinstance(block, (TextBlock, DocumentBlock))
    )


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: _Blocks

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> Self:
        for block in self.content:
            if isinstance(block, (ToolUseBlock, ThinkingBlock)) and self.role != "assistant":
                raise ValueError(f"a {self.role} message cannot hold a {block.type} block")
            if isinstance(block, ToolResultBlock) and self.role != "user":
                raise ValueError(f"a {self.role} message cannot hold a tool_result block")
        return self

    def for_template(self, tool_names: dict[str, str]) -> Iterator[dict[str, Any]]:
        """As one or several messages. Each call is added to `tool_names`, by its id."""
        if self.role == "assistant":
            yield self._answer(tool_names)
            return
        said: list[object] = []
        for block in self.content:
            if not isinstance(block, ToolResultBlock):
                said.append(block)
                continue
            yield from self._said(said)
            said = []
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
            name = tool_names.get(block.tool_use_id)
            yield result if name is None else {**result, "name": name}
        yield from self._said(said)

    def _said(self, blocks: list[object]) -> Iterator[dict[str, Any]]:
        if blocks:
            yield {"role": self.role, "content": _texts(blocks, _SEPARATOR)}

    def _answer(self, tool_names: dict[str, str]) -> dict[str, Any]:
        """The blocks of an answer are pieces of one text: they are joined without a separator."""
        answer: dict[str, Any] = {"role": "assistant", "content": _texts(self.content, "")}
        thinking = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        if any(thinking):
            answer["reasoning_content"] = "".join(thinking)
        if calls:
            answer["tool_calls"] = [call.for_template() for call in calls]
            tool_names.update((call.id, call.name) for call in calls)
        return answer


class AnthropicTool(_Block):
    """A tool run by the client. Anthropic's server tools, which have no schema, are left out."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: arguments always follow the schema

    def definition(self) -> dict[str, Any]:
        """In OpenAI's format, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


_TOOL_CHOICES = {
    "auto": ToolChoice.AUTO,
    "none": ToolChoice.NONE,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.REQUIRED,
}


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_what_it_forces(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError('{"type": "tool"} needs a name, and no other type has one')
        return self

    def chosen(self) -> ChosenTools:
        names = None if self.name is None else (self.name,)
        return ChosenTools(_TOOL_CHOICES[self.type], names, is_one=self.name is not None)


class AnthropicThinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_BUDGET, le=MAX_MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_its_budget(self) -> Self:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ValueError('{"type": "enabled"} needs budget_tokens, and no other type has them')
        return self


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat = None


class CountTokensRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`: the fields that become part of the prompt."""

    NOT_YET: ClassVar[NotYet] = {
        "container": (None,),
        "fallbacks": (None, []),
        "mcp_servers": (None, []),
        "output_format": (None,),
    }

    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Annotated[
        list[TextBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), BeforeValidator(_as_blocks)
    ] = Field(default_factory=list)
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: object = None

    @field_validator("messages")
    @classmethod
    def _ends_where_an_answer_may_begin(
        cls, messages: list[AnthropicMessage]
    ) -> list[AnthropicMessage]:
        last = messages[-1]
        if last.role == "assistant" and not all(isinstance(b, TextBlock) for b in last.content):
            raise ValueError(
                "a final assistant message is continued, so it may only contain text; "
                "end with a user message"
            )
        return messages

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's, which the answer then continues."""
        return self.messages[-1].role == "assistant"

    @property
    def unknown_fields(self) -> list[str]:
        blocks = [block for message in self.messages for block in message.content]
        results = [block for b in blocks if isinstance(b, ToolResultBlock) for block in b.content]
        left_out = {b.type for b in (*blocks, *results) if isinstance(b, UnknownBlock)}
        tools = {str(t.type or t.name) for t in self.tools or () if t.input_schema is None}
        return [
            *super().unknown_fields,
            *(f"blocks of type {kind}" for kind in sorted(left_out)),
            *(f"the tool {kind}" for kind in sorted(tools)),
        ]

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def messages_for_template(self) -> list[dict[str, Any]]:
        """Consecutive messages of one role become one message."""
        messages: list[dict[str, Any]] = []
        system = _without_billing_line(_texts(self.system, _SEPARATOR))
        if system:
            messages.append({"role": "system", "content": system})
        tool_names: dict[str, str] = {}
        for message in self.messages:
            for turn in message.for_template(tool_names):
                _append(messages, turn)
        return messages

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.definition() for tool in self.tools or () if tool.input_schema is not None]

    def turn(self) -> AssistantTurn:
        """Raises ApiError 400."""
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        asked = self.thinking.budget_tokens if self.thinking else None
        return turn_of(
            self.definitions,
            choice.chosen(),
            parallel=not choice.disable_parallel_tool_use,
            thinking_budget=thinking_budget(asked, self.template_kwargs()),
        )

    def template_kwargs(self) -> dict[str, bool | str]:
        """Thinking is off by default, as with Anthropic's own models."""
        kwargs: dict[str, bool | str] = {
            "enable_thinking": self.thinking is not None and self.thinking.type != "disabled"
        }
        if self.output_config is not None and self.output_config.effort is not None:
            effort = self.output_config.effort
            kwargs["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
        return kwargs


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`. `min_tokens`, `min_p`, `seed`, `stop_on_repetition`,
    `cache_salt`, `skip_prefix_cache` and `priority` are extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_MAX_TOKENS)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: float | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_MAX_TOKENS)] | None = None
    seed: int | None = None
    stop_on_repetition: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    skip_prefix_cache: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _leaves_room_for_the_answer(self) -> Self:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError("thinking: budget_tokens must be below max_tokens")
        return self

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The model's defaults, overridden by the given fields. Raises ApiError 400."""
        given = self.sent(_SAMPLING)
        given["stop"] = tuple(self.stop_sequences or ())
        given["structure"] = self.output_config.format if self.output_config else None
        return sampling_params(defaults, given, _field_named)


def _field_named(name: str) -> str:
    return "stop_sequences" if name == "stop" else name


def _append(messages: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    last = messages[-1] if messages else {}
    if turn["role"] == last.get("role") and turn["role"] in ("user", "system"):
        messages[-1] = {**last, "content": f"{last['content']}{_SEPARATOR}{turn['content']}"}
    else:
        messages.append(turn)


def _without_billing_line(system: str) -> str:
    if not system.startswith(BILLING_LINE):
        return system
    return system.partition("\n")[2].lstrip("\n")
