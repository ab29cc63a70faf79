import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxserve.history.calls import CallsPiece, CallState
from mlxserve.mcp.results import CallResult
from mlxserve.mcp.toolbox import Permission, Tool, Toolbox
from tests.mcp.kept_settings import KeptSettings
from tui.chat.tool_loop import MAX_ROUNDS, Decision, Messages, ToolLoop
from tui.talk.errors import ChatError
from tui.talk.pieces import Finish, Piece, TextPiece, ThinkingPiece, ToolPiece

QUESTION: Messages = [{"role": "user", "content": "?"}]
CALL = ToolPiece(0, "s__echo", '{"text": "hi"}', "id-1")


class EchoBox(Toolbox):
    """A toolbox with one tool, of no server."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), KeptSettings())
        self.permission = Permission.ALWAYS
        self.calls: list[tuple[str, str]] = []

    async def start(self) -> None:
        """There is no server."""

    def offered(self) -> list[Tool]:
        fields: dict[str, Any] = {"server": "s", "tool": "echo", "description": "", "schema": {}}
        tool = Tool(name="s__echo", permission=self.permission, **fields)
        return [] if self.permission is Permission.NEVER else [tool]

    async def permit(self, name: str, permission: Permission) -> None:
        assert name == "s__echo"
        self.permission = permission

    async def call(self, name: str, arguments: str) -> CallResult:
        self.calls.append((name, arguments))
        return CallResult(f"echo {arguments}", is_error=name != "s__echo")


class Model:
    """Answers with scripts, then with "Yes."."""

    def __init__(self, *scripts: list[Piece]) -> None:
        self._scripts = list(scripts)
        self.asked: list[tuple[Messages, Sequence[dict[str, Any]]]] = []

    async def ask(
        self, messages: Messages, tools: Sequence[dict[str, Any]]
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append(([*messages], tools))
        for piece in self._scripts.pop(0) if self._scripts else [TextPiece("Yes."), Finish("stop")]:
            yield piece


def heard(
    model: Model,
    box: EchoBox,
    decision: Decision = Decision.ONCE,
    messages: Messages = QUESTION,
    **how: bool,
) -> list[Piece | CallsPiece]:
    async def confirm(tool: Tool, arguments: str) -> Decision:
        assert (tool.name, arguments) == ("s__echo", CALL.arguments)
        return decision

    async def run() -> list[Piece | CallsPiece]:
        loop = ToolLoop(box, confirm)
        return [piece async for piece in loop.answer(model.ask, messages, **how)]

    return asyncio.run(run())


def states(pieces: Sequence[Piece | CallsPiece]) -> list[CallState]:
    return [piece.calls[0].state for piece in pieces if isinstance(piece, CallsPiece)]


def test_an_answer_without_a_call_is_passed_on() -> None:
    model, box = Model(), EchoBox()
    assert heard(model, box) == [TextPiece("Yes."), Finish("stop")]
    assert model.asked == [(QUESTION, [box.offered()[0].definition])]


def test_a_call_is_made_and_its_result_sent() -> None:
    model = Model([ThinkingPiece("hm"), TextPiece("Look:"), CALL, Finish("tool_calls")])
    box = EchoBox()
    pieces = heard(model, box, has_thinking=True)
    assert states(pieces) == [CallState.ASKED, CallState.RUNNING, CallState.DONE]
    assert pieces[-2:] == [TextPiece("Yes."), Finish("stop")]
    assert Finish("tool_calls") not in pieces
    assert box.calls == [("s__echo", CALL.arguments)]
    function = {"name": "s__echo", "arguments": CALL.arguments}
    assert model.asked[1][0] == [
        *QUESTION,
        {
            "role": "assistant",
            "content": "Look:",
            "tool_calls": [{"id": "id-1", "type": "function", "function": function}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "id-1", "content": f"echo {CALL.arguments}"},
    ]


@pytest.mark.parametrize(
    ("decision", "kept", "is_called"),
    [
        (Decision.ONCE, Permission.ASK, True),
        (Decision.ALWAYS, Permission.ALWAYS, True),
        (Decision.NOT_NOW, Permission.ASK, False),
        (Decision.NEVER, Permission.NEVER, False),
    ],
)
def test_the_user_decides(decision: Decision, kept: Permission, is_called: bool) -> None:
    model, box = Model([CALL, Finish("tool_calls")]), EchoBox()
    box.permission = Permission.ASK
    pieces = heard(model, box, decision)
    assert box.permission is kept
    assert bool(box.calls) is is_called
    assert states(pieces)[-1] is (CallState.DONE if is_called else CallState.REFUSED)
    if not is_called:
        assert model.asked[1][0][-1]["content"] == "The user did not allow this call."


def test_a_call_of_an_unknown_tool_is_answered_without_asking() -> None:
    model = Model([ToolPiece(0, "other", "{}"), Finish("stop")])
    box = EchoBox()
    box.permission = Permission.ASK
    pieces = heard(model, box)
    assert states(pieces)[-1] is CallState.FAILED
    assert model.asked[1][0][-1]["tool_call_id"] == "call_0_0"


def test_a_call_that_was_cut_off_is_not_made() -> None:
    model, box = Model([CALL, Finish("length")]), EchoBox()
    assert heard(model, box) == [CALL, Finish("length")]
    assert box.calls == []


def test_without_tools_a_call_is_only_passed_on() -> None:
    model, box = Model([CALL, Finish("tool_calls")]), EchoBox()
    box.permission = Permission.NEVER
    assert heard(model, box) == [CALL, Finish("tool_calls")]
    assert model.asked == [(QUESTION, [])]


def test_a_continued_answer_is_one_message_with_its_call() -> None:
    model, box = Model([TextPiece(" there"), CALL, Finish("tool_calls")]), EchoBox()
    begun = [*QUESTION, {"role": "assistant", "content": "Hello"}]
    heard(model, box, messages=begun, continues=True)
    assert [m["content"] for m in model.asked[1][0]] == [
        *("?", "Hello there", f"echo {CALL.arguments}")
    ]


def test_rounds_are_bounded() -> None:
    calls: list[list[Piece]] = [[CALL, Finish("tool_calls")] for _ in range(MAX_ROUNDS + 1)]
    model, box = Model(*calls), EchoBox()
    with pytest.raises(ChatError, match="without answering"):
        heard(model, box)
    assert len(box.calls) == MAX_ROUNDS
