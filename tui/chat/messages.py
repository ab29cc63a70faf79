"""What a chat is made of, as data: messages in a tree, and the figures of one answer.

A message's children are alternatives to each other: editing a question or asking again adds a
sibling, and nothing is ever overwritten. Frozen; the store is the only writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"


class State(StrEnum):
    """Where an answer is. Questions are always DONE."""

    WRITING = "writing"
    DONE = "done"
    CUT = "cut"  # the model ran into its limit on length
    STOPPED = "stopped"  # by the reader; what had come is kept
    FAILED = "failed"  # by the server or the connection; what had come is kept


CAN_CONTINUE = (State.CUT, State.STOPPED, State.FAILED)
_SHORTEST_MEASURE = 0.05  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """What one answer took. None: not known (yet), or the server does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    differs_at: int | None = None  # the first token of the prompt that was not known
    miss: str = ""  # why no more of the prompt was in the cache; empty: not known
    completion_tokens: int | None = None
    first_token_seconds: float | None = None  # from sending to the first text or thinking
    decode_seconds: float | None = None  # from the first to the last piece

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: the first token belongs to the prompt's time, not to this.

        None for pieces that came as good as together: a few milliseconds measure the terminal.
        """
        if self.decode_seconds is None or self.decode_seconds < _SHORTEST_MEASURE:
            return None
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    id: int
    chat_id: int
    parent_id: int | None
    role: Role
    text: str
    thinking: str = ""
    state: State = State.DONE
    error: str = ""
    model: str = ""
    stats: AnswerStats = field(default_factory=AnswerStats)
    created_at: float = 0.0  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecord:
    id: int
    title: str
    created_at: float
    updated_at: float
    leaf_id: int | None = None  # the end of the branch that was last shown
    system: str = ""  # how the model is told to answer, before the first question


@dataclass(frozen=True, slots=True)
class Version:
    """Which of its siblings a message is: the second of three is Place(1, (7, 9, 12))."""

    index: int
    sibling_ids: tuple[int, ...]

    def neighbour(self, step: int) -> int | None:
        at = self.index + step
        return self.sibling_ids[at] if 0 <= at < len(self.sibling_ids) else None


def wire_messages(path: Sequence[ChatMessage], system: str = "") -> list[dict[str, str]]:
    """The conversation as the API wants it: in turns, because some chat templates insist on it.

    Answers without text say nothing; questions that then stand together become one.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for message in path:
        if not message.text:
            continue
        if messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] += f"\n\n{message.text}"
        else:
            messages.append({"role": message.role.value, "content": message.text})
    return messages
