"""Chats, their messages as a tree, and the statistics of an answer. Frozen data.

A message's children are alternatives to each other: editing a question or regenerating an answer
adds a sibling, and never overwrites anything. The store is the only writer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mlxserve.history.calls import ToolRound, round_messages
from mlxserve.history.picture import KeptImage


class Role(StrEnum):
    USER = "user"
    ASSISTANT = "assistant"


class State(StrEnum):
    """The state of an answer. Questions are always DONE."""

    WRITING = "writing"
    DONE = "done"
    CUT = "cut"  # reached the length limit
    REPEATED = "repeated"  # itself, so that the server ended it
    STOPPED = "stopped"  # by the user; the text so far is kept
    FAILED = "failed"  # in the server or the connection; the text so far is kept


CAN_CONTINUE = (State.CUT, State.STOPPED, State.FAILED)
_MIN_MEASURED = 0.05  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Token counts and times of one answer; None if unknown, or not reported by the server."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    page_size: int | None = None  # tokens of a page of the cache
    differs_at: int | None = None  # the first token of the prompt that was not cached
    miss: str = ""  # why no more of the prompt was cached; empty: not known
    completion_tokens: int | None = None
    accepted_tokens: int | None = None  # of the completion, drafted ones; None without drafts
    first_token_seconds: float | None = None  # time from sending to the first text or thinking
    decode_seconds: float | None = None  # time from the first to the last piece

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed, without the first token, which belongs to prefill.

        None if the pieces arrived almost together: a few milliseconds would measure the terminal.
        """
        if self.decode_seconds is None or self.decode_seconds < _MIN_MEASURED:
            return None
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_seconds

    @property
    def pages(self) -> tuple[int, int] | None:
        """(pages from the cache, pages) of the prompt; None if the server does not say.

        The last page may be a part of one.
        """
        if self.cached_tokens is None or not self.prompt_tokens or not self.page_size:
            return None
        return self.cached_tokens // self.page_size, math.ceil(self.prompt_tokens / self.page_size)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step of the model yielded; None where each yielded one."""
        if not self.completion_tokens or not self.accepted_tokens:
            return None
        return self.completion_tokens / max(1, self.completion_tokens - self.accepted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
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
    rounds: tuple[ToolRound, ...] = ()  # rounds of tool calls, before its text
    created_at: float = 0.0  # seconds since the epoch
    images: tuple[KeptImage, ...] = ()  # images and documents of a question

    @property
    def num_characters(self) -> int:
        """Characters of its texts and images."""
        texts = [self.text, self.thinking, *(image.url for image in self.images)]
        for each in self.rounds:
            texts += [each.text, each.thinking]
            for call in each.calls:
                texts += [call.arguments, call.result, *call.images]
        return sum(map(len, texts))


@dataclass(frozen=True, slots=True)
class NewQuestion:
    """The next question. `typed`: as the user wrote it, with mentions of files."""

    text: str
    images: tuple[KeptImage, ...] = ()
    typed: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The start of a chat that the model no longer gets, because the context was full."""

    last_id: int  # its last message
    newest_id: int  # the chat's newest message when it was left out
    summary: str = ""  # replaces them for the model


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRecord:
    id: int
    title: str
    created_at: float
    updated_at: float
    leaf_id: int | None = None  # the last message of the branch shown last
    system: str = ""  # the system prompt
    folder: str = ""  # its folder's name; empty: in none
    is_pinned: bool = False
    left_out: LeftOut | None = None

    @property
    def num_characters(self) -> int:
        """Characters of the texts that a list of chats has of it."""
        return len(self.system) + len(self.left_out.summary if self.left_out else "")


@dataclass(frozen=True, slots=True)
class Version:
    """A message's position among its siblings: the second of three is Version(1, (7, 9, 12))."""

    index: int
    sibling_ids: tuple[int, ...]

    def neighbour(self, step: int) -> int | None:
        at = self.index + step
        return self.sibling_ids[at] if 0 <= at < len(self.sibling_ids) else None


def wire_messages(path: Sequence[StoredMessage], system: str = "") -> list[dict[str, Any]]:
    """The conversation as messages of the API, with alternating roles, as some chat templates require.

    Answers without text are left out; adjacent questions are merged into one. Calls of tools come with
    their results.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in path:
        for tool_round in message.rounds:
            messages += round_messages(tool_round)
        if not message.text and not message.images:
            continue
        content = _content(message)
        if messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] = _joined(messages[-1]["content"], content)
        else:
            messages.append({"role": message.role.value, "content": content})
    return messages


def with_text_of_documents(message: StoredMessage) -> StoredMessage:
    """Put the texts of documents before the question, for servers that read none."""
    documents = [each for each in message.images if each.is_document]
    if not documents:
        return message
    texts = [f"{each.name}:\n{each.text}" for each in documents]
    images = tuple(each for each in message.images if not each.is_document)
    return replace(message, text="\n\n".join([*texts, message.text]), images=images)


def _content(message: StoredMessage) -> str | list[dict[str, Any]]:
    """Return the text, or parts if there are images or documents, which come first."""
    if not message.images:
        return message.text
    images = [image.part() for image in message.images]
    return [*images, *_parts(message.text)]


def _joined(
    earlier: str | list[dict[str, Any]], later: str | list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if isinstance(earlier, str) and isinstance(later, str):
        return f"{earlier}\n\n{later}"
    return [*_parts(earlier), *_parts(later)]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content
