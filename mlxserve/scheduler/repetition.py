"""Finds answers that repeat themselves: a model in a loop goes on until its context is full.

    ... and then and then and then and then
                 └─period─┘└─period─┘

What counts as a loop is exact repetition, long enough that hardly any wanted text has it: a short
piece 200 tokens long, a long piece (up to 128 tokens) eight times.
"""

from __future__ import annotations

from mlxserve.request import TokenIds

INTERVAL = 16  # tokens of an answer between two checks
MAX_PERIOD = 128  # tokens
MIN_TIMES = 8
MIN_TOKENS = 200  # of all repetitions together

_ANCHOR = 16  # tokens: the end of a loop occurs a period earlier as well


def repeats_itself(token_ids: TokenIds, first: int) -> bool:
    """Return True if the answer that begins at `first` ends in a loop; checked every INTERVAL tokens.

    Takes a few microseconds: earlier places of the last tokens are searched for in bytes, and a repetition is
    compared only there.
    """
    num_outputs = len(token_ids) - first
    if num_outputs % INTERVAL or num_outputs < MIN_TOKENS:
        return False
    tail = token_ids[-min(num_outputs, MIN_TIMES * MAX_PERIOD) :]
    size, content = tail.itemsize, tail.tobytes()
    anchor = content[-_ANCHOR * size :]
    start = len(content) - len(anchor)
    earliest = max(0, start - MAX_PERIOD * size)
    at = start
    while (at := content.rfind(anchor, earliest, at + len(anchor) - 1)) >= 0:
        period = (start - at) // size
        length = max(MIN_TOKENS, MIN_TIMES * period)
        if (start - at) % size or length > len(tail):
            continue  # a match across tokens, or not repeated often enough yet
        if content[-length * size : -period * size] == content[(period - length) * size :]:
            return True
    return False
