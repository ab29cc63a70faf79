"""What keeps a helper's job from its result."""

from __future__ import annotations

from enum import StrEnum


class KillReason(StrEnum):
    """Why a child ended before its job did."""

    TIME = "time"
    MEMORY = "memory"
    ENDED = "ended"  # by itself, or by a signal of others
    CLOSED = "closed"  # the helper was closed
    NOT_STARTED = "not_started"  # the system refused a process or a socket


class HelperKilled(Exception):
    """The child has ended before its job did. The message completes "The job ..."."""

    def __init__(self, reason: KillReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class JobFailed(Exception):
    """The job raised an exception in the child."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
