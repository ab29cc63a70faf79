"""Anthropic's message, whole or as events.

    message_start
      content_block_start, ping                               the first block
        content_block_delta ...                               thinking, text or a tool's input
      content_block_stop
      content_block_start ... content_block_stop              and so on
    message_delta (stop_reason, usage)
    message_stop

The stream begins with the first piece of the answer, when it is known how much of the prompt was
cached, or with the first ping if that takes long. A tool's input is sent when it is complete, as
Anthropic's API does: its clients parse what has come after every delta, and end the answer with an
exception where that is not JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxserve.api.answers import Answers
from mlxserve.api.errors import ApiError
from mlxserve.api.server.sse import named_event
from mlxserve.api.usage import Tokens, reports
from mlxserve.request import FinishReason
from mlxserve.text.conversation import Call
from mlxserve.text.parsing.turn import ToolCallDelta
from mlxserve.text.signature import sign

if TYPE_CHECKING:
    from mlxserve.text.deltas import Delta

Event = dict[str, Any]
_PING: Event = {"type": "ping"}


@dataclass(slots=True)
class Blocks:
    """The content of a growing message.

    Each delta changes the blocks, and yields the events that make the same change on the client's
    side.
    """

    shows_thinking: bool = True
    content: list[dict[str, Any]] = field(default_factory=list)
    _arguments: str = ""
    _thinking: str = ""
    _is_open: bool = False

    def push(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._think(delta.reasoning)
        if delta.text:
            yield from self._write(delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "thinking":
            # Clients send blocks with a signature back, also those whose thinking was not shown.
            block["signature"] = sign(self._thinking)
            self._thinking = ""
            yield self._delta("signature_delta", signature=block["signature"])
        if block["type"] == "tool_use" and self._arguments:
            call = Call(block["id"], block["name"], self._arguments)
            block["input"] = call.as_object()
            yield self._delta("input_json_delta", partial_json=call.as_json())
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _think(self, text: str) -> Iterator[Event]:
        yield from self._ensure({"type": "thinking", "thinking": "", "signature": ""})
        self._thinking += text
        if self.shows_thinking:
            self.content[-1]["thinking"] += text
            yield self._delta("thinking_delta", thinking=text)

    def _write(self, text: str) -> Iterator[Event]:
        yield from self._ensure({"type": "text", "text": ""})
        self.content[-1]["text"] += text
        yield self._delta("text_delta", text=text)

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            yield from self.close()
            self._arguments = ""
            yield from self._start(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            )
        self._arguments += call.arguments

    def _ensure(self, block: dict[str, Any]) -> Iterator[Event]:
        """Open a block of this type unless the open one has it."""
        if not self._is_open or self.content[-1]["type"] != block["type"]:
            yield from self.close()
            yield from self._start(block)

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        self._is_open = True
        self.content.append(block)
        index = len(self.content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}
        if index == 0:
            yield _PING

    def _delta(self, kind: str, **piece: str) -> Event:
        index = len(self.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **piece}}


@dataclass(slots=True, kw_only=True)
class MessageReply:
    """The reply to one request, while its message is generated."""

    id: str
    model: str
    num_prompt: int
    max_tokens: int
    shows_thinking: bool = True
    _blocks: Blocks = field(init=False)
    _last: Delta | None = None
    _has_started: bool = False

    def __post_init__(self) -> None:
        self._blocks = Blocks(self.shows_thinking)

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """The content built from the same events, in their order."""
        async for delta in answers:
            self._last = delta
            for _event in self._blocks.push(delta):
                pass
        for _event in self._blocks.close():
            pass
        tokens = answers.tokens
        return {
            **self._message(tokens),
            "content": self._blocks.content,
            **self._stop(tokens),
        }

    def opening(self) -> bytes:
        """No events: the message starts with the first delta, which tells how much was cached."""
        return b""

    def push(self, delta: Delta) -> bytes:
        self._last = delta
        start = self._start(Tokens.from_usages({} if delta.usage is None else {0: delta.usage}))
        return b"".join(map(_frame, (*start, *self._blocks.push(delta))))

    def ending(self, tokens: Tokens) -> bytes:
        end = {"type": "message_delta", "delta": self._stop(tokens), "usage": _usage(tokens)}
        return b"".join(map(_frame, (*self._blocks.close(), end, {"type": "message_stop"})))

    def failure(self, error: ApiError) -> bytes:
        return _frame({"type": "error", "error": error.anthropic_body(None)["error"]})

    def keepalive(self) -> bytes:
        """A ping, preceded by the start of the message if it has not started.

        Such a start counts the prompt as not cached; the end of the stream has the true count.
        """
        start = self._start(Tokens(self.num_prompt, 0, 0))
        return b"".join(map(_frame, (*start, _PING)))

    def _start(self, tokens: Tokens) -> Iterator[Event]:
        if not self._has_started:
            self._has_started = True
            yield {"type": "message_start", "message": self._message(tokens)}

    def _message(self, tokens: Tokens) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(tokens),
        }

    def _stop(self, tokens: Tokens) -> dict[str, Any]:
        assert self._last is not None, "an answer ended without a delta"
        return {
            "stop_reason": self._stop_reason(self._last, tokens),
            "stop_sequence": self._last.stop,
        }

    def _stop_reason(self, last: Delta, tokens: Tokens) -> str:
        if last.finish_reason is FinishReason.TOOL_CALLS:
            return "tool_use"
        if last.finish_reason is FinishReason.LENGTH:
            is_asked = tokens.completion >= self.max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded"
        return "end_turn" if last.stop is None else "stop_sequence"


def _usage(tokens: Tokens) -> dict[str, Any]:
    """Anthropic's token counts, which add up to the prompt: `input_tokens` were not cached.

    Writes to the cache cost nothing extra and are not counted.
    """
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.completion,
        **reports(tokens),
    }


def _frame(event: Event) -> bytes:
    return named_event(event["type"], event)
