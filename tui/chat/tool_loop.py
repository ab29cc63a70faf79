"""ToolLoop: asks the model, runs the calls that the user allows, and asks again.

    ask -> pieces ... calls -> confirm -> call -> results -> ask ...   until an answer without a call

To its reader this is one stream of pieces. Cancelling the reader stops a running call.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mlxserve.history.calls import CallRecord, CallsPiece, CallState, ToolRound, round_messages
from mlxserve.mcp.toolbox import Permission, Tool, Toolbox
from tui.talk.errors import ChatError
from tui.talk.pieces import Finish, Piece, TextPiece, ThinkingPiece, ToolPiece

MAX_ROUNDS = 25
MAX_CALLS = 16  # calls in one round
_COMPLETE = (
    "tool_calls",
    "stop",
    "function_call",
)  # reasons of `Finish`; a call that was cut off is not made

_UNSEEN = "(Images are not shown to models of this server.)"

Messages = list[dict[str, Any]]
Ask = Callable[[Messages, Sequence[dict[str, Any]]], AsyncGenerator[Piece, None]]


class Decision(StrEnum):
    """The user's decision about a call."""

    ONCE = "once"
    ALWAYS = "always"
    NOT_NOW = "not now"
    NEVER = "never"


_KEPT = {Decision.ALWAYS: Permission.ALWAYS, Decision.NEVER: Permission.NEVER}
Confirm = Callable[[Tool, str], Awaitable[Decision]]  # gets the tool and the arguments


@dataclass(slots=True)
class _Heard:
    """The model's output in the running round."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # index -> id, name, arguments

    def take(self, piece: Piece) -> None:
        match piece:
            case TextPiece(text):
                self.text.append(text)
            case ThinkingPiece(text):
                self.thinking.append(text)
            case ToolPiece(index, name, arguments, call_id):
                call = self.calls.setdefault(index, ["", "", ""])
                call[0] = call[0] or call_id
                call[1] += name
                call[2] += arguments

    def called(self, num_round: int) -> list[CallRecord]:
        return [
            CallRecord(id=call_id or f"call_{num_round}_{index}", name=name, arguments=arguments)
            for index, (call_id, name, arguments) in list(self.calls.items())[:MAX_CALLS]
        ]


@dataclass(frozen=True)
class ToolLoop:
    """Runs the loop; `confirm` is called before every call that is not always allowed."""

    _toolbox: Toolbox
    _confirm: Confirm

    async def answer(
        self, ask: Ask, messages: Messages, *, continues: bool = False, has_thinking: bool = False
    ) -> AsyncGenerator[Piece | CallsPiece, None]:
        """Stream the answer and its calls. Raises ChatError.

        continues: the last message is the beginning of the answer
        has_thinking: the server takes the thinking of rounds before the answer, and images of results
        """
        await self._toolbox.start()
        messages = list(messages)
        heard = _Heard()
        if continues:
            heard.text.append(messages[-1]["content"])
        for number in range(MAX_ROUNDS):
            tools = [tool.definition for tool in self._toolbox.offered()]
            end: Finish | None = None
            async with aclosing(ask(messages, tools)) as pieces:
                async for piece in pieces:
                    heard.take(piece)
                    if tools and isinstance(piece, Finish) and heard.calls:
                        end = piece
                    else:
                        yield piece
            if end is None:
                return
            if end.reason not in _COMPLETE:
                yield end
                return
            calls = heard.called(number)
            yield CallsPiece(tuple(calls), is_new=True)
            for at, call in enumerate(calls):
                async for changed in self._called(call, has_images=has_thinking):
                    calls[at] = changed
                    yield CallsPiece(tuple(calls))
            # Its beginning is a part of the round.
            if continues:
                del messages[-1]
                continues = False
            done = ToolRound("".join(heard.text), "".join(heard.thinking), tuple(calls))
            messages += round_messages(done, has_thinking=has_thinking)
            heard = _Heard()
        raise ChatError(
            f"The model called tools {MAX_ROUNDS} times without answering, so it was stopped. Ask again, "
            "or switch tools off with /tools."
        )

    async def _called(
        self, call: CallRecord, *, has_images: bool
    ) -> AsyncGenerator[CallRecord, None]:
        """Make a call and yield its record whenever it changes."""
        tool = self._toolbox.tool(call.name)
        if tool is not None and tool.permission is not Permission.ALWAYS:
            decision = await self._confirm(tool, call.arguments)
            if decision in _KEPT:
                await self._toolbox.permit(tool.name, _KEPT[decision])
            if decision in (Decision.NOT_NOW, Decision.NEVER):
                yield replace(call, state=CallState.REFUSED)
                return
        yield replace(call, state=CallState.RUNNING)
        started = time.monotonic()
        result = await self._toolbox.call(call.name, call.arguments)
        yield replace(
            call,
            state=CallState.FAILED if result.is_error else CallState.DONE,
            result=result.text if has_images or not result.images else f"{result.text}\n{_UNSEEN}",
            seconds=time.monotonic() - started,
            images=result.images if has_images else (),
        )
