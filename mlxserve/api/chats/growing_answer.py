"""GrowingAnswer: an answer while it is written: what the model sent so far, in rounds of tool calls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxserve.history.calls import CallRecord, CallState, ToolRound
from mlxserve.history.messages import State, StoredMessage

MAX_CALLS = 16  # in one round


class AnswerFailed(Exception):
    """The answer cannot go on; the message is for its reader."""


class GrowingAnswer:
    """One answer of a chat. Used in the event loop only."""

    def __init__(self, message: StoredMessage) -> None:
        """Begin with a message as stored: what a continued answer has stays."""
        self._message = message
        self._texts = [message.text]
        self._thoughts = [message.thinking]
        self._calls: dict[int, CallRecord] = {}
        self._sent_at = self._first_at = self._last_at = 0.0
        self.state = State.WRITING
        self.error = ""
        self.cuts = ""  # which parts of documents were not read
        self.rounds: list[ToolRound] = list(message.rounds)
        self.num_changes = 0

    @property
    def id(self) -> int:
        return self._message.id

    @property
    def text(self) -> str:
        return _joined(self._texts)

    @property
    def thinking(self) -> str:
        return _joined(self._thoughts)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.rounds

    def record(self) -> StoredMessage:
        """The answer as it is stored."""
        return replace(
            self._message,
            text=self.text,
            thinking=self.thinking,
            state=self.state,
            error=self.error,
            rounds=tuple(self.rounds),
        )

    def begin(self) -> None:
        """A request to the model begins."""
        self._calls.clear()
        self._first_at = self._last_at = 0.0
        self._sent_at = time.monotonic()

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk of the model's stream. Raises AnswerFailed for an error in it."""
        if "error" in chunk:
            raise AnswerFailed(str(chunk["error"].get("message", "The answer failed.")))
        self.num_changes += 1
        if usage := chunk.get("usage"):
            self._note(usage)
        if not self._message.model:
            self._message = replace(self._message, model=str(chunk.get("model", "")))
        for choice in chunk["choices"]:
            self._last_at = time.monotonic()
            self._first_at = self._first_at or self._last_at
            delta = choice["delta"]
            self._texts.append(delta.get("content") or "")
            self._thoughts.append(delta.get("reasoning_content") or "")
            for part in delta.get("tool_calls") or ():
                self._take_call(part)
            if choice.get("finish_reason") == "length":
                self.state = State.CUT
            if choice.get("stop_reason") == "repetition":
                self.state = State.REPEATED

    def end_request(self) -> list[CallRecord]:
        """Note the time of a request that has ended, and return the calls that the model wants."""
        if self._first_at:
            stats = replace(
                self._message.stats,
                first_token_seconds=self._first_at - self._sent_at,
                decode_seconds=self._last_at - self._first_at,
            )
            self._message = replace(self._message, stats=stats)
        return list(self._calls.values())[:MAX_CALLS]

    def add_round(self, calls: Sequence[CallRecord]) -> None:
        """Make the text so far the beginning of a round of calls."""
        self.rounds.append(ToolRound(self.text, self.thinking, tuple(calls)))
        self._texts, self._thoughts = [], []
        self.num_changes += 1

    def change_call(self, at: int, **changes: Any) -> None:
        """Change the call number `at` of the last round."""
        last = self.rounds[-1]
        calls = list(last.calls)
        calls[at] = replace(calls[at], **changes)
        self.rounds[-1] = replace(last, calls=tuple(calls))
        self.num_changes += 1

    def end(self, state: State, error: str = "") -> None:
        """End the answer; calls that are open count as stopped."""
        self.state, self.error = state, error
        self.rounds = [each.ended() for each in self.rounds]
        self.num_changes += 1

    def _take_call(self, part: Mapping[str, Any]) -> None:
        index = int(part["index"])
        call = self._calls.get(index)
        if call is None:
            call = CallRecord(id=part.get("id") or f"call_{index}", name="", arguments="")
        function = part.get("function") or {}
        self._calls[index] = replace(
            call,
            name=call.name + (function.get("name") or ""),
            arguments=call.arguments + (function.get("arguments") or ""),
            state=CallState.ASKED,
        )

    def _note(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        cache, speculation = usage.get("cache") or {}, usage.get("speculation") or {}
        stats = replace(
            self._message.stats,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens", 0),
            page_size=cache.get("page_size"),
            accepted_tokens=speculation.get("accepted_tokens"),
        )
        self._message = replace(self._message, stats=stats)


def _joined(pieces: list[str]) -> str:
    """Join pieces, and keep the result as the only one of them."""
    pieces[:] = ["".join(pieces)]
    return pieces[0]
