"""AssistantTurn: the allowed contents of the next turn, and its tool calls.

Data only: the vocabulary of the API, the library and the parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias


class ToolChoice(StrEnum):
    """The choice of whether a turn may, must, or must not call a tool."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # no calls; what looks like one is text
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """The allowed contents of an assistant's turn.

    tools: definitions in OpenAI's format, {"type": "function", "function": {...}}
    tool_name: the only tool to call; requires `ToolChoice.REQUIRED`
    parallel_tool_calls: False ends the turn after its first call
    thinking_budget: number of tokens after which thinking is forced to end; None: no limit
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    thinking_budget: int | None = None

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice is not ToolChoice.NONE


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A streamed piece of one tool call.

    The first piece of an `index` has the id and the name; the joined arguments are JSON. The calls
    of an answer come one after another.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Event: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete tool call. `arguments` is JSON unless the answer was cut off inside it."""

    id: str
    name: str
    arguments: str


def join_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join pieces into complete calls."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name or "", delta.arguments))
        else:
            last = calls[-1]
            assert delta.index == len(calls) - 1, "calls are interleaved"
            calls[-1] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return tuple(calls)
