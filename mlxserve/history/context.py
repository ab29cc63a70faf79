"""A chat's use of its model's context, and the messages to drop when it is full.

Servers count: an answer's statistics have the tokens of its prompt, which is the conversation
before it, and its own. What is left out stays on disk; the model no longer gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.history.messages import LeftOut, Role, StoredMessage, wire_messages

NEARLY_FULL = 0.8  # share of the context
_SUMMARY = "Summary of the conversation so far:"


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Use of the context in tokens; `limit` is None if the server does not report it."""

    used: int
    limit: int | None

    @property
    def fraction(self) -> float:
        return self.used / self.limit if self.limit else 0.0

    @property
    def is_nearly_full(self) -> bool:
        return self.fraction >= NEARLY_FULL

    @property
    def label(self) -> str:
        """The use as `1.2k / 32k`; empty if unknown."""
        if self.limit is None:
            return _short(self.used) + " tokens" if self.used else ""
        return f"{_short(self.used)} / {_short(self.limit)}"


def num_left_out(path: Sequence[StoredMessage], left_out: LeftOut | None) -> int:
    """Number of messages at the start of this branch that the model no longer gets."""
    ids = [message.id for message in path]
    return 0 if left_out is None or left_out.last_id not in ids else ids.index(left_out.last_id) + 1


def sent_messages(
    path: Sequence[StoredMessage], system: str, left_out: LeftOut | None
) -> list[dict[str, Any]]:
    """Messages of this branch for the model.

    These are the system prompt, a summary of what was left out, and the messages after that.
    """
    first = num_left_out(path, left_out)
    summary = left_out.summary if left_out is not None and first else ""
    parts = [system, f"{_SUMMARY}\n{summary}" if summary else ""]
    return wire_messages(path[first:], "\n\n".join(part for part in parts if part))


def used_tokens(path: Sequence[StoredMessage], left_out: LeftOut | None) -> int:
    """Tokens of this branch in the next prompt, as far as known."""
    counts = _counts(path, left_out)
    return counts[-1][1] if counts else 0


def last_to_go(
    path: Sequence[StoredMessage], left_out: LeftOut | None, kept: int
) -> StoredMessage | None:
    """Return the answer up to which messages must go to keep at most `kept` tokens.

    The last question comes on top. None if no further answer can go.
    """
    counts = _counts(path, left_out)
    if counts:
        total = counts[-1][1]
        return next(answer for answer, count in counts if total - count <= kept)
    sent = path[num_left_out(path, left_out) :]
    return next((message for message in reversed(sent) if message.role is Role.ASSISTANT), None)


def _counts(
    path: Sequence[StoredMessage], left_out: LeftOut | None
) -> list[tuple[StoredMessage, int]]:
    """Pair each answer with the tokens up to it, without those left out since."""
    first = num_left_out(path, left_out)
    gone = _tokens(path[first - 1]) or 0 if first else 0
    counts = []
    for message in path[first:]:
        count = _tokens(message)
        if count is not None:
            was_before = left_out is not None and message.id <= left_out.newest_id
            counts.append((message, count - gone if was_before else count))
    return counts


def _tokens(message: StoredMessage) -> int | None:
    """Tokens of the conversation up to this answer, as it was sent then."""
    stats = message.stats
    if message.role is not Role.ASSISTANT or stats.prompt_tokens is None:
        return None
    return stats.prompt_tokens + (stats.completion_tokens or 0)


def _short(count: int) -> str:
    """Abbreviate a count: `950`, `1.2k`, `32k`."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count / 1000:.0f}k"
