"""StepTimeModel: the step budget as time: the prompt tokens that fit into a target beside decodes.

    budget = (target - time of a step of decodes alone) / time of a prompt token

Both are averages of measured steps, kept per size, because a decode step grows with the number of
requests in it and a prompt token's cost with the context before it. Time is passed in: no clock.
The average is of the time of a token, not of tokens per second: a mixed step that happens to take
hardly longer than its decodes would count as an endless rate, and one such step in four made the
next one 20 times too long. Chunks smaller than a page were tried if the target leaves no room for
one: with 8 tokens the longest gap of an answer fell from 8.8 steps to 5.4, and the long prompt took
1.2 to 2.2 times as long. The idea of a budget that follows measured steps is P-PAS's and
Sarathi-Serve's (arXiv 2403.02310).

If the device has a watchdog, a step is also bounded by its multiply-adds, with or without decodes:

    work = longest step * measured multiply-adds a second
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxserve.core.forward_work import ForwardWork, WorkBudget
from mlxserve.request import Chunk
from mlxserve.scheduler.row_times import RowTimes
from mlxserve.system.suspend_clock import RUNNING, SHORTEST_PAUSE

_WEIGHT = 0.3  # of the newest measurement in the running average
_MIN_SHARE = 0.1  # of a mixed step's time, counted as that of its prompt tokens
_MIN_SECONDS = 1e-9  # of a token: a coarse clock may measure a step as none at all
# Seconds of a step on Metal: macOS ends command buffers that run for several (5 in one report).
_LONGEST_STEP = 1.0
_TELLING_SHARE = 0.25  # of that: shorter steps wait for weights, and look slower than they are
_MIN_PIECE = 16  # tokens of an embedded text; fewer would take as long
MAX_PIECE = 256  # a request that arrives meanwhile waits for the piece
# On Metal, where MLX keeps the activations of a third of the layers and more (machine.py): 0.5 GB of an 8B
# model.
MAX_METAL_PIECE = 64
# Seconds of an image's piece if no answers run: a request that arrives waits for it.
_IDLE_PIECE = 0.1


class StepTimeModel:
    """Learns from steps how many prompt tokens the next one may take."""

    def __init__(
        self,
        target: float | None,
        forward: ForwardWork | None = None,
        row_times: RowTimes | None = None,
    ) -> None:
        """Learn step times.

        target: seconds between two tokens of a running answer; None for no limit
        forward: the model's work, if the device ends steps that take too long
        row_times: told of steps of decodes as well, and asked for theirs; None without drafts
        """
        self.target = target
        self._row_times = row_times
        self._forward = forward
        self._work_seconds: float | None = None  # seconds of a multiply-add
        self._decode_seconds: dict[int, float] = {}  # by the bit length of the number of decodes
        self._token_seconds: dict[
            int, float
        ] = {}  # of a prompt's token, by the bit length of the context

    def observe(self, chunks: Sequence[Chunk], seconds: float, waited: float = 0.0) -> None:
        """Learn from a step that took `seconds` on the device.

        waited: seconds before them in which the device had nothing to do, while the step was planned
        """
        prefills = [c for c in chunks if c.start < c.request.prefill_end]
        # The rows of drafts cost as much as other decodes.
        num_decodes = len(chunks) - len(prefills) + sum(len(chunk.draft) for chunk in chunks)
        if prefills and self._forward is not None:
            work = sum(self._forward.of_chunk(chunk.start, chunk.length) for chunk in chunks)
            self.learn_speed(work, seconds)
        if not prefills:
            _average(self._decode_seconds, num_decodes.bit_length(), seconds)
            if self._row_times is not None:
                # A draft needs the tokens of the step before: the wait for its plan is part of its price.
                longest = max(len(chunk.draft) for chunk in chunks)
                waited = waited if longest else 0.0
                self._row_times.observe(num_decodes, seconds + waited, longest)
            return
        num_tokens = sum(chunk.length for chunk in prefills)
        others = self._decode_time(num_decodes) if num_decodes else 0.0
        own_seconds = max(seconds - others, _MIN_SHARE * seconds)
        context = max(chunk.end for chunk in prefills)
        seconds_each = max(own_seconds / num_tokens, _MIN_SECONDS)
        _average(self._token_seconds, context.bit_length(), seconds_each)

    def budget(self, num_decodes: int, context: int) -> int | None:
        """Return the prompt tokens that fit into the next step; None for no limit.

        num_decodes: requests that decode in it, and tokens of their drafts
        context: the longest prompt's position
        """
        if self.target is None or num_decodes == 0 or not self._token_seconds:
            return None
        left = self.target - self._decode_time(num_decodes)
        return max(0, int(left / _nearest(self._token_seconds, context.bit_length())))

    def prompt_seconds(self, num_tokens: int) -> float | None:
        """Estimated seconds to compute a prompt; None before the first measurement."""
        if not self._token_seconds:
            return None
        return num_tokens * _nearest(self._token_seconds, num_tokens.bit_length())

    def learn_speed(self, work: int, seconds: float) -> None:
        """Learn from a step of `work` multiply-adds that includes prompt tokens."""
        newest = max(seconds, _MIN_SECONDS) / work
        known = self._work_seconds
        if known is None:
            self._work_seconds = newest
        elif newest < known or seconds >= _TELLING_SHARE * _LONGEST_STEP:
            self._work_seconds = known + _WEIGHT * (newest - known)

    def work_budget(self) -> WorkBudget | None:
        """The work that fits into the longest step; None for no limit."""
        if self._forward is None or self._work_seconds is None:
            return None
        return WorkBudget(self._forward, _LONGEST_STEP / self._work_seconds)

    def _decode_time(self, num_decodes: int) -> float:
        if not self._decode_seconds:
            return 0.0
        if self._row_times is not None:
            seconds = self._row_times.seconds(num_decodes)
            if seconds is not None:
                return seconds
        return _nearest(self._decode_seconds, num_decodes.bit_length())


class EmbeddingTimeModel:
    """How much of a text to embed between two steps: half of the target's time.

    A piece is measured together with the step that it waits for, so pieces tend to be too small.
    """

    def __init__(self, target: float | None, max_piece: int = MAX_PIECE) -> None:
        """`target` is that of `StepTimeModel`; pieces have at most `max_piece` tokens."""
        self._target = target
        self._max_piece = max_piece
        self._token_seconds: float | None = None

    def size(self, *, is_busy: bool) -> int:
        """Tokens of the next piece. `is_busy`: answers wait for it."""
        if self._target is None or not is_busy:
            return self._max_piece
        if self._token_seconds is None:
            return min(_MIN_PIECE, self._max_piece)
        return max(_MIN_PIECE, min(self._max_piece, int(self._target / 2 / self._token_seconds)))

    def seconds(self, *, is_busy: bool) -> float:
        """Seconds of the next piece of an image, whose encoder has no tokens to count."""
        return self._target / 2 if self._target is not None and is_busy else _IDLE_PIECE

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a piece of this size."""
        newest = max(seconds / num_tokens, _MIN_SECONDS)
        old = newest if self._token_seconds is None else self._token_seconds
        self._token_seconds = old + _WEIGHT * (newest - old)


class StepTimer:
    """Measures how long the device takes for each step, from when it could begin until it is read.

    launched n ──── launched n+1 ──── read n ─────────── read n+1
    └──────────── n ────────────────┘ └────── n+1 ──────┘

    If n is read before n+1 is planned, the device waits for the plan: `waited`.
    """

    def __init__(self, was_paused: Callable[[float], bool] = RUNNING.was_paused) -> None:
        """was_paused: True if the process was paused in the last seconds."""
        self._was_paused = was_paused
        self.restart()

    def restart(self) -> None:
        """Forget the launched step."""
        self._launched = 0.0  # launch time of the unread step
        self._last_read = 0.0
        self._is_disturbed = False
        self._was_idle = True  # since the last read
        self.waited = 0.0  # seconds from the last read to the launch of the unread step

    def launched(self, now: float) -> None:
        self._launched = now
        self.waited = 0.0 if self._was_idle else now - self._last_read
        self._was_idle = False

    def idle(self) -> None:
        """Leave the time until the next launch out of `waited`, because nothing could be planned."""
        self._was_idle = True

    def disturb(self) -> None:
        """Skip the next measurement: the device did other work as well."""
        self._is_disturbed = True

    def read(self, now: float) -> float | None:
        """Return the seconds of the step that was read; None if they include other work."""
        seconds = None if self._is_disturbed else now - max(self._launched, self._last_read)
        self._is_disturbed = False
        self._last_read = now
        if seconds is not None and seconds >= SHORTEST_PAUSE and self._was_paused(seconds):
            return None
        return seconds


def _average(averages: dict[int, float], key: int, value: float) -> None:
    old = averages.get(key, value)
    averages[key] = old + _WEIGHT * (value - old)


def _nearest(averages: dict[int, float], key: int) -> float:
    """Return the value of the nearest key; of two, the larger key's."""
    if key in averages:
        return averages[key]
    _, nearest = min((abs(known - key), -known) for known in averages)
    return averages[-nearest]
