"""Errors of helpers' jobs."""

from __future__ import annotations

import signal
from enum import StrEnum

from mlxserve.core.errors import EngineStopped, HelperUnavailable, MlxServeError


class KillReason(StrEnum):
    """The reasons for which a child ended before its job did."""

    TIME = "time"
    MEMORY = "memory"
    ENDED = "ended"  # ended by itself, or by another's signal
    CLOSED = "closed"  # the helper was closed
    LEFT = "left"  # its result was not wanted any more
    NOT_STARTED = "not_started"  # the system refused a process or a socket
    PAUSED = "paused"  # it did not run all the time, and the job did not end in time


class HelperKilled(Exception):
    """The child has ended before its job did. The message completes "The job ..."."""

    def __init__(self, reason: KillReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def without_blame(self, what: str, *, was_tried_twice: bool = False) -> MlxServeError | None:
        """Return the error of a request whose job may succeed in another process.

        None if the job is to blame.

        what: begins the sentence that this error completes
        was_tried_twice: by `Helper.call_twice`, for a job that cannot end its process by itself
        """
        if was_tried_twice and self.reason is KillReason.ENDED:
            return HelperUnavailable(f"{what} was ended twice; send the request again")
        match self.reason:
            case KillReason.CLOSED:
                return EngineStopped("The engine was closed.")
            case KillReason.NOT_STARTED | KillReason.PAUSED | KillReason.LEFT:
                return HelperUnavailable(f"{what} {self}; send the request again")
        return None


class JobFailed(Exception):
    """The job raised an exception in the child."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message


def describe_exit(code: int | None) -> str:
    """Describe a process's exit code or signal; None if neither is known yet."""
    if code is None:
        return "why is not known yet"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
