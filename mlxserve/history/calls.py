"""Calls of tools inside an answer. Frozen data, and its forms on disk and in a request.

An answer is made of rounds: in each the model wrote text and called tools, and got their results; what it
wrote after the last round is the answer's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from mlxserve.history.attachment import fence_around


class CallState(StrEnum):
    ASKED = "asked"  # waits for the user
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # in the tool or on the way to it; the result says how
    REFUSED = "refused"  # by the user
    STOPPED = "stopped"  # by the user


_OPEN = (CallState.ASKED, CallState.RUNNING)
_RESULTS = {
    CallState.REFUSED: "The user did not allow this call.",
    CallState.STOPPED: "The user stopped this call.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """A tool call; `arguments` is JSON as the model wrote it.

    `result` goes to the model, and `images` (data: URLs) to one that sees.
    """

    id: str
    name: str
    arguments: str
    state: CallState = CallState.ASKED
    result: str = ""
    seconds: float | None = None
    images: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.state in _OPEN

    @property
    def answer(self) -> str:
        """The result for the model, also of a call that was not made."""
        state = CallState.STOPPED if self.is_open else self.state
        return self.result or _RESULTS.get(state, "(no output)")


@dataclass(frozen=True, slots=True)
class ToolRound:
    text: str
    thinking: str
    calls: tuple[CallRecord, ...]

    def ended(self) -> ToolRound:
        """Mark calls that are still open as stopped."""
        calls = (replace(c, state=CallState.STOPPED) if c.is_open else c for c in self.calls)
        return replace(self, calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class CallsPiece:
    """A piece of a streamed answer: the current calls of its last round.

    is_new: a round that begins with them, with the text so far
    """

    calls: tuple[CallRecord, ...]
    is_new: bool = False


def round_messages(tool_round: ToolRound, *, has_thinking: bool = False) -> list[dict[str, Any]]:
    """Return the request messages of a round."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments or "{}"},
        }
        for call in tool_round.calls
    ]
    said: dict[str, Any] = {"role": "assistant", "content": tool_round.text, "tool_calls": calls}
    if has_thinking and tool_round.thinking:
        said["reasoning_content"] = tool_round.thinking
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": _content(call)}
        for call in tool_round.calls
    ]
    return [said, *results]


def _content(call: CallRecord) -> str | list[dict[str, Any]]:
    if not call.images:
        return call.answer
    images = ({"type": "image_url", "image_url": {"url": url}} for url in call.images)
    return [{"type": "text", "text": call.answer}, *images]


def rounds_text(rounds: Sequence[ToolRound]) -> str:
    """Serialise rounds for the chats' file; empty for none."""
    return json.dumps(list(map(round_fields, rounds)), ensure_ascii=False) if rounds else ""


def round_fields(tool_round: ToolRound) -> dict[str, Any]:
    """Return a round as JSON has it: a call without images has no field of them."""
    written = asdict(tool_round)
    for call in written["calls"]:
        if not call["images"]:
            del call["images"]
    return written


def rounds_of(text: str) -> tuple[ToolRound, ...]:
    """Parse the result of `rounds_text`."""
    return tuple(map(round_of, json.loads(text))) if text else ()


def rounds_markdown(rounds: Iterable[ToolRound]) -> str:
    """Format rounds for an exported chat."""
    parts = []
    for tool_round in rounds:
        parts += [tool_round.text] if tool_round.text.strip() else []
        for call in tool_round.calls:
            fence = fence_around(call.answer)
            parts.append(
                f"Called `{call.name}` with `{call.arguments}`:\n\n{fence}\n{call.answer}\n{fence}"
            )
    return "\n\n".join(parts)


def round_of(fields: Mapping[str, Any]) -> ToolRound:
    """Parse the result of `round_fields`."""
    calls = tuple(
        CallRecord(
            **{**call, "state": CallState(call["state"]), "images": tuple(call.get("images", ()))}
        )
        for call in fields["calls"]
    )
    return ToolRound(fields["text"], fields["thinking"], calls)
