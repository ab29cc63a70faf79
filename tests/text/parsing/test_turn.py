"""A turn's permission to call, and calls assembled from streamed pieces."""

from __future__ import annotations

from mlxserve.text.parsing.turn import (
    AssistantTurn,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    join_calls,
)

TOOL = {"type": "function", "function": {"name": "look"}}


def test_join_calls_assembles_streamed_pieces() -> None:
    pieces = [
        ToolCallDelta(0, "call_a", "look", '{"at":'),
        ToolCallDelta(0, arguments=" 1}"),
        ToolCallDelta(1, "call_b", "go"),
        ToolCallDelta(1, arguments="{}"),
    ]
    assert join_calls(pieces) == (
        ToolCall("call_a", "look", '{"at": 1}'),
        ToolCall("call_b", "go", "{}"),
    )


def test_a_turn_may_call_its_tools_unless_tool_choice_is_none() -> None:
    assert AssistantTurn(tools=[TOOL]).may_call
    assert not AssistantTurn().may_call
    assert not AssistantTurn(tools=[TOOL], tool_choice=ToolChoice.NONE).may_call
