"""Frames: what a helper process and its parent write to their socket.

    parent ──▶ child    pickle     first (target, arguments, seconds, memory), then jobs:
                                   (number, method, arguments, seconds)
    child  ──▶ parent   msgpack    [number of the job, 0 for the setup; kind; value]

The number keeps the answer of one job from being taken for another's: they may be of two clients.

The parent does not trust the child, whose input is hostile: msgpack yields plain data and bytes,
never other objects.
"""

from __future__ import annotations

import struct
from enum import IntEnum

LENGTH = struct.Struct("<I")  # length of a frame, before its content
MAX_FRAME = 1 << 28
NO_MEMORY = 77  # exit code of a child that got a MemoryError
# Seconds after its deadline when a child that was not killed ends itself.
MARGIN = 1.0
# A job's seconds are seconds of a processor where it got one: on a busy machine a clock ends it after so
# many times as long.
MAX_TIMES = 5


class Kind(IntEnum):
    """The kind of a child's message."""

    READY = 0  # it is set up
    VALUE = 1  # a job yielded this, and continues
    RESULT = 2  # the job ended
    ERROR = 3  # the job, or the setup, raised [name of the exception's type, message]
