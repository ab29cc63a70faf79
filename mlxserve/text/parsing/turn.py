"""What the next turn of a conversation may hold, and the pieces it comes in.

Data only: the API, the library and the parser all speak of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolChoice(StrEnum):
    """Whether a turn calls a tool."""

    AUTO = "auto"  # as the model likes
    NONE = "none"  # no: what looks like a call is text
    REQUIRED = "required"  # at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """An assistant's turn, whose thinking and calls are told apart from its text.

    tools: definitions as OpenAI spells them, {"type": "function", "function": {...}}
    tool_name: the one tool to call, which goes with `REQUIRED`
    parallel_tool_calls: False ends the turn after its first call
    thinking_budget: tokens after which the end of the thinking is forced; None is no limit
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
class ToolCallDelta:
    """A piece of one call of a tool.

    The first of its `index` has the id and the name; the arguments, joined, are JSON. The calls of
    an answer come one after the other.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call; `arguments` is JSON, unless the answer was cut short within it."""

    id: str
    name: str
    arguments: str


def join_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that these pieces make."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name or "", delta.arguments))
        else:
            last = calls[-1]
            assert delta.index == len(calls) - 1, "calls are interleaved"
            calls[-1] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return tuple(calls)
