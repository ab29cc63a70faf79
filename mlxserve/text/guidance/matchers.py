"""Matchers: the engine's side of the process that computes masks.

    step n is read ── its tokens, of all guided answers, in one message ──▶ helper process
    outputs of n are delivered, n+1 is planned                                computes
    a row is planned ◀── its mask has arrived                         ◀── one answer per row

Where masks are slow, clients take turns (`mlxserve.helpers.fair_executor.FairOrder`).

The engine's thread never waits for long: at most `GRACE` for a message, and not at all where the
last ones were late. A row without its mask is left out of the step. If an answer takes longer than
`MASK_SECONDS`, the process is killed; the row that it was at work on fails, and the others' matchers
begin again in a new process, with all of their tokens.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxserve.core.sampling_params import Structure
from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.fair_executor import FairOrder
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.job import Job
from mlxserve.request import owner_of
from mlxserve.system.suspend_clock import RUNNING
from mlxserve.text.guidance.matcher_host import KEPT_BYTES, Row, RowOutcome

log = logging.getLogger("mlxserve.guidance")

MASK_SECONDS = 2.0  # time of one answer's mask
COMPILE_SECONDS = 20.0  # time to compile beside the masks what took at most 2 s alone
# Seconds of a message with several rows, by their last masks.
MESSAGE_SECONDS = 0.05
# Seconds from a message until a step is planned without the masks that it asks for.
GRACE = 0.02
_LATE_SECONDS = 1.0  # without such a wait, after a message that took longer
_AGAIN_SECONDS = 0.002  # between two questions whether a grammar is compiled
_MEMORY_SECONDS = 1.0  # between two checks of the process's size
_BUSY_SECONDS = 60.0  # between two restarts for its size while answers are being followed
MAX_FORESEEN = 8  # forced or likely tokens of which masks are computed in advance


@dataclass(frozen=True, slots=True)
class Grammar:
    """A structure to follow in an answer to a client."""

    structure: Structure
    matchers: Matchers
    client: str = ""
    is_slow: bool = False  # slow to compile

    def open(self, tokens: Iterable[int] = ()) -> Matcher:
        """Return a matcher at the structure's start, which then consumes the tokens."""
        return Matcher(self, tokens)


class Matcher:
    """The progress of one answer in its structure; valid while `is_settled`."""

    def __init__(self, grammar: Grammar, tokens: Iterable[int]) -> None:
        self.grammar = grammar
        self.tokens = array("i", tokens)
        self.outcome: RowOutcome | None = None
        self.mask = b""
        # Tokens that follow if the grammar allows no others, or likely ones, and the mask after each of them.
        self.foreseen: tuple[int, ...] = ()
        self.foreseen_masks: tuple[bytes, ...] = ()
        self.likely: Sequence[int] = ()  # tokens that may follow those consumed
        self.error: str | None = None  # reason of an outcome REFUSED or FAILED
        # The process was killed because of it, or cannot work.
        self.is_lost = False
        self.number = grammar.matchers.new_number(self)
        # The number of the process that knows it; 0 for none.
        self.process = 0
        # Tokens that the process has seen.
        self.num_known = 0
        # Processes that ended by themselves while at work on it.
        self.num_ends = 0
        self.asked_at: float | None = None  # time of the question whether its grammar is compiled
        self.seconds = 0.0  # processor time of its last mask
        self._matchers = grammar.matchers

    @property
    def is_settled(self) -> bool:
        """True if the outcome covers all tokens."""
        return self.outcome is not None and (
            self.error is not None or self.num_known == len(self.tokens)
        )

    def consume(self, token: int) -> None:
        """Append a token, which the next `ask` sends."""
        if self.error is None:
            self.outcome = None
            self.likely = ()
            self.tokens.append(token)
            self._matchers.want(self)

    def expect(self, likely: Sequence[int]) -> None:
        """Foresee these tokens with the next outcome, which a settled matcher asks for again."""
        self.likely = likely
        if likely and self.error is None and self.is_settled:
            self.outcome = None
            self._matchers.want(self)

    def ask(self) -> None:
        """Request the outcome, together with those of all matchers that consumed tokens."""
        if not self.is_settled:
            self._matchers.want(self)
        self._matchers.exchange()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the outcome; True if it is there."""
        until = RUNNING.now() + seconds
        self.ask()
        while not self.is_settled and (left := until - RUNNING.now()) > 0:
            self._matchers.receive(left)
        return self.is_settled

    def wait_briefly(self) -> bool:
        """Wait as long as a step may be held up; True if the outcome is there."""
        if self.is_settled:
            return True
        self.ask()
        while not self.is_settled and (left := self._matchers.grace()) > 0:
            self._matchers.receive(left)
        return self.is_settled

    def fail(self, error: str) -> None:
        """Fail the answer for a reason outside the grammar."""
        self.outcome, self.error, self.is_lost = RowOutcome.FAILED, error, True


class Matchers:
    """The matchers of one engine. Not thread-safe, except `close`."""

    def __init__(
        self,
        helper: Helper,
        vocab_size: int,
        refuse: Callable[[Structure, str, str], None],
    ) -> None:
        """refuse: called with a structure that had to be killed, its client, and why."""
        self._helper = helper
        self._mask_size = -(-vocab_size // 32) * 4
        self._vocab_size = vocab_size
        self.num_foreseen = 0  # forced or likely tokens whose masks are computed with each mask
        self._refuse = refuse
        self._numbers = itertools.count()  # numbers of matchers, whichever process they are in
        self._open: weakref.WeakValueDictionary[int, Matcher] = weakref.WeakValueDictionary()
        self._forgotten: deque[int] = deque()
        self._wanted: dict[Matcher, None] = {}  # matchers whose tokens are to be sent
        # Orders clients by the time of their masks.
        self._order = FairOrder[Matcher]()
        # Matchers of this job, each with its number of tokens.
        self._asked: dict[int, tuple[Matcher, int]] = {}
        self._job: Job | None = None
        self._sent_at = 0.0
        self._late_until = 0.0
        # Time to ask again whether a grammar is compiled.
        self._again_at = 0.0
        self._looked_at = 0.0
        self._restarted_at = -_BUSY_SECONDS

    def close(self) -> None:
        """End the process. The thread that used it must have stopped."""
        if self._job is not None and not self._job.is_done:
            self._job.cancel()
        self._helper.close()

    def new_number(self, matcher: Matcher) -> int:
        """Return a new matcher's number. Thread-safe."""
        number = next(self._numbers)
        weakref.finalize(matcher, self._forgotten.append, number).atexit = False
        return number

    def want(self, matcher: Matcher) -> None:
        """Send its tokens with the next message, unless they are already sent."""
        if self._asked.get(matcher.number) != (matcher, len(matcher.tokens)):
            self._wanted[matcher] = None

    def exchange(self) -> None:
        """Send new tokens and take arrived answers, without waiting."""
        if self._job is not None:
            self._take(self._job, 0)
        if self._job is None and self._wanted:
            self._send()

    def receive(self, seconds: float) -> None:
        """Like `exchange`, but wait up to `seconds` for an answer."""
        if self._job is not None:
            self._take(self._job, seconds)
        self.exchange()
        # A grammar is being compiled.
        if self._job is None and self._wanted:
            time.sleep(min(seconds, max(0.0, self._again_at - RUNNING.now())))

    def grace(self) -> float:
        """Seconds that planning a step may still wait for the current message."""
        now = RUNNING.now()
        if now < self._late_until or self._job is None:
            return 0.0
        left = self._sent_at + GRACE - now
        if left <= 0:
            self._late_until = now + _LATE_SECONDS
        return left

    def _send(self) -> None:
        now = RUNNING.now()
        if now < self._again_at and all(each.asked_at is not None for each in self._wanted):
            return
        self._bound(now)
        try:
            # Before the rows: a process that has ended since then has lost its matchers.
            self._helper.start()
        except HelperKilled as error:
            self._give_up(error)
            return
        chosen = self._chosen()
        rows = [self._row(matcher) for matcher in chosen]
        likely = [list(matcher.likely) for matcher in chosen]
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        try:
            self._job = self._helper.begin(
                "follow", rows, forgotten, self.num_foreseen, likely, seconds=MASK_SECONDS
            )
        except HelperKilled as error:
            self._lose(error)
            return
        self._sent_at = now

    def _chosen(self) -> list[Matcher]:
        """Matchers of the next message.

        Where masks are slow it has a few of them, first those of clients whose masks have taken the
        least: the others' answers go on meanwhile.
        """
        chosen: list[Matcher] = []
        seconds = 0.0
        for matcher in self._order.sorted(self._wanted, lambda each: each.grammar.client):
            seconds += matcher.seconds
            if chosen and seconds > MESSAGE_SECONDS:
                break
            chosen.append(matcher)
            del self._wanted[matcher]
        return chosen

    def _row(self, matcher: Matcher) -> Row:
        number, process = matcher.number, self._helper.num_started
        if is_new := matcher.process != process:
            matcher.process, matcher.num_known = process, 0
            self._open[number] = matcher
        self._asked[number] = matcher, len(matcher.tokens)
        grammar = matcher.grammar
        source = grammar.structure.kind.value, grammar.structure.source
        tokens = matcher.tokens[matcher.num_known :].tolist()
        return number, source, is_new, grammar.is_slow, tokens, owner_of(grammar.client)

    def _take(self, job: Job, seconds: float) -> None:
        try:
            for value in job.receive(seconds):
                self._settle(value)
        except HelperKilled as error:
            self._lose(error)
        except JobFailed as error:
            self._job = None
            self._fail_asked(f"cannot be followed: {error}")
        else:
            if job.is_done:
                self._job = None
                self._fail_asked("was not answered")

    def _settle(self, value: Any) -> None:
        """Apply the answer of one row, which is validated: the process is not trusted."""
        match value:
            case [int(number), int(outcome), bytes(masks), float(seconds), *foreseen] if (
                number in self._asked
                and outcome in (RowOutcome.MASK, RowOutcome.STOPPED)
                and len(masks) == self._mask_size * (1 + len(foreseen))
                and all(type(token) is int and 0 <= token < self._vocab_size for token in foreseen)
            ):
                matcher, num_tokens = self._asked.pop(number)
                matcher.num_known = num_tokens
                size = self._mask_size
                matcher.mask, *following = (
                    masks[first : first + size] for first in range(0, len(masks), size)
                )
                matcher.foreseen, matcher.foreseen_masks = tuple(foreseen), tuple(following)
                matcher.outcome = RowOutcome(outcome)
                matcher.num_ends, matcher.asked_at = 0, None
                matcher.seconds = seconds
                self._order.charge(matcher.grammar.client, seconds)
            case [int(number), RowOutcome.LATER, _, _] if number in self._asked:
                self._ask_again(self._asked.pop(number)[0])
            case [int(number), int(outcome), str(reason), _] if (
                number in self._asked and outcome in (RowOutcome.REFUSED, RowOutcome.FAILED)
            ):
                matcher, _ = self._asked.pop(number)
                matcher.outcome, matcher.error = RowOutcome(outcome), reason or "it does not fit"
            case _:
                self._helper.stop()
                self._fail_asked("was not answered")

    def _ask_again(self, matcher: Matcher) -> None:
        """Ask later for a matcher whose grammar is being compiled."""
        now = RUNNING.now()
        matcher.process = 0
        matcher.asked_at = matcher.asked_at or now
        if now - matcher.asked_at > COMPILE_SECONDS:
            error = f"took longer than {COMPILE_SECONDS:g} s to compile"
            self._helper.stop()
            self._blame(matcher, error)
            return
        self._again_at = now + _AGAIN_SECONDS
        self.want(matcher)

    def _lose(self, error: HelperKilled) -> None:
        """Handle the end of the process: the first unanswered row is the one it was at work on."""
        self._job = None
        pending = [matcher for matcher, _ in self._asked.values()]
        self._asked.clear()
        if error.reason is KillReason.CLOSED:
            for matcher in pending:
                matcher.fail(str(error))
            return
        for matcher in pending[1:]:
            self.want(matcher)
        if pending:
            pending[0].num_ends += error.reason is KillReason.ENDED
            # It may have been ended by the system or an operator: one more try, after the others.
            is_ended = error.reason is KillReason.ENDED and pending[0].num_ends == 1
            if is_ended or error.reason is KillReason.PAUSED:
                self.want(pending[0])
            else:
                self._blame(pending[0], str(error))

    def _blame(self, matcher: Matcher, error: str) -> None:
        matcher.fail(f"it {error}")
        log.warning("A grammar is refused from now on: it %s", error)
        grammar = matcher.grammar
        self._refuse(grammar.structure, grammar.client, f"cannot be followed: it {error}")

    def _give_up(self, error: HelperKilled) -> None:
        for matcher in self._wanted:
            matcher.fail(f"the process for masks {error}")
        self._wanted.clear()

    def _fail_asked(self, error: str) -> None:
        for matcher, _ in self._asked.values():
            matcher.fail(error)
        self._asked.clear()

    def _bound(self, now: float) -> None:
        """Restart a process that did not give the memory of dropped grammars back."""
        if now - self._looked_at < _MEMORY_SECONDS:
            return
        self._looked_at = now
        started = self._helper.num_started
        is_idle = not any(matcher.process == started for matcher in self._open.values())
        is_large = self._helper.num_grown > (1.25 if is_idle else 2.5) * KEPT_BYTES
        if is_large and (is_idle or now - self._restarted_at > _BUSY_SECONDS):
            self._restarted_at = now
            log.info("The process for masks has grown, and starts again")
            self._helper.stop()
