"""DraftController: how many tokens each decode of a step drafts, so that drafts never lose.

    candidates   every (answer, position), by the chance that all drafts up to it are right
    steps        every prefix of that list: n decodes and r drafted rows
    value        (n + sum of the chances) / time of n + r rows, in tokens per second
    choice       the best value, if it beats n / time of n rows by 5 %

A prefix is enough: a step of other candidates as many would be worth less at the same time. All
answers are decided together, because rows of one step share a pass of the weights. Acceptance is
learnt for each answer by position, beginning with that of all answers.

What keeps it from losing: plain decode is timed first, and again after every 48 steps with drafts.
What keeps it from giving up: after plain steps, one answer drafts one token, at first after 8, then
after up to 256 steps. Such trials are paid from 1 % of the time. Where no step would pay even if every
guess were right, a trial could only find that the times are wrong: it is made after 16,384 steps.

Plain Python without a clock: a choice is a function of the calls made so far, and of the times that
`RowTimes` was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from mlxserve.scheduler.row_times import RowTimes

MARGIN = 0.05  # by which drafts must be faster
RECHECK = 48  # steps with drafts, after which plain decode is timed again
FIRST_WAIT, LAST_WAIT = 8, 256  # plain steps before a trial
HOPELESS_WAIT = 16384  # where only wrong times could make drafts pay
_DOUBT = 0.1  # by which a step's time may be wrong
_BUDGET = 0.01  # of the time, for trials
_MAX_SAVED = 20  # steps that the budget may save up
_SAVED_FOR_TRIAL = 1.5  # steps; a trial costs less than one
_SAVED_FOR_MORE = 0.5
_EXTEND_EVERY = 6  # steps with drafts, of which one tries a size that has never run
_UNSURE = 1.03  # times the time of a size that is not known
_FIRST_CHANCE = 0.5  # before anything is learnt
_NEXT_CHANCE = 0.9  # of that of the position before

A = TypeVar("A")  # an answer


class Acceptance:
    """The chance that the j-th drafted token is right, if those before it are."""

    def __init__(self, keep: float, prior_weight: float) -> None:
        """Begin without drafts.

        keep: what is left of a draft's weight at the next one
        prior_weight: of what is assumed before the first, in drafts
        """
        self._keep, self._prior_weight = keep, prior_weight
        self._right: list[float] = []
        self._seen: list[float] = []

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        more = num_drafted - len(self._seen)
        self._right += [0.0] * more
        self._seen += [0.0] * more
        for at in range(min(num_accepted + 1, num_drafted)):
            self._right[at] = self._keep * self._right[at] + (num_accepted > at)
            self._seen[at] = self._keep * self._seen[at] + 1

    def chance(self, at: int, prior: float) -> float:
        if at >= len(self._seen):
            return prior
        weight = self._prior_weight
        return (self._right[at] + weight * prior) / (self._seen[at] + weight)


_NEW = Acceptance(keep=1.0, prior_weight=1)  # an answer that has drafted nothing yet


class Refusal(NamedTuple):
    """Why nothing was drafted: the best step of that time."""

    num_rows: int
    steps: float  # its time in steps without drafts
    gain: float  # its expected tokens in those of a step without drafts

    def __str__(self) -> str:
        return (
            f"plain is faster here: {self.num_rows} rows take {self.steps:.1f} steps "
            f"and yield {self.gain:.1f}"
        )


class _Choice(NamedTuple, Generic[A]):
    lengths: dict[A, int]
    cost: float = 0.0  # of a trial, in units of RowTimes
    is_extended: bool = False
    refusal: Refusal | None = None


class DraftController(Generic[A]):
    """Chooses the drafts of each step from what earlier ones cost and gained."""

    def __init__(self, times: RowTimes | None = None) -> None:
        self.times = times or RowTimes()
        self.refusal: Refusal | None = None  # of the last plan; None if it drafted, or could not
        self._all = Acceptance(keep=0.995, prior_weight=2)
        self._of: dict[A, Acceptance] = {}  # by answer
        self._saved = 0.0  # for trials, in units of RowTimes
        self._num_plain = 0  # steps since the last draft or trial
        self._wait = FIRST_WAIT
        self._num_drafted = 0  # steps

    @property
    def num_kept(self) -> int:
        """Number of answers whose acceptance is kept."""
        return len(self._of)

    def pays(self, num_decodes: int, longest: Mapping[A, int]) -> bool:
        """Return True if `plan` would draft now. Changes nothing."""
        return bool(self._choose(num_decodes, longest, sum(longest.values())).lengths)

    def plan(self, num_decodes: int, longest: Mapping[A, int], max_tokens: int) -> dict[A, int]:
        """Return the tokens that each answer drafts in this step, those with none left out.

        num_decodes: answers that decode in the step
        longest: most tokens that an answer could draft, for those that can
        max_tokens: of all of them
        """
        choice = self._choose(num_decodes, longest, max_tokens)
        plain = self.times.shape(num_decodes)
        saved = min(self._saved + _BUDGET * plain, _MAX_SAVED * plain)
        self._saved = max(0.0, saved - choice.cost)
        if choice.lengths:
            self.refusal = None
        elif longest:
            self.refusal = choice.refusal or self.refusal
        if not choice.lengths:
            self._num_plain += 1
        elif choice.cost and not choice.is_extended:
            self._num_plain, self._wait = 0, min(LAST_WAIT, 2 * self._wait)
        else:
            self._num_plain, self._wait = 0, FIRST_WAIT
            self._num_drafted += 1
        return choice.lengths

    def learn(self, answer: A, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft whose first `num_accepted` tokens were right."""
        own = self._of.setdefault(answer, Acceptance(keep=0.93, prior_weight=4))
        own.learn(num_drafted, num_accepted)
        self._all.learn(num_drafted, num_accepted)

    def forget(self, answer: A) -> None:
        """Drop what is known of an answer that has ended."""
        self._of.pop(answer, None)

    def clear(self) -> None:
        self._of.clear()

    def _choose(self, num_decodes: int, longest: Mapping[A, int], max_tokens: int) -> _Choice[A]:
        times = self.times
        is_stale = times.is_measured and (
            not times.is_known(num_decodes) or times.num_drafted >= RECHECK
        )
        if is_stale or not longest or max_tokens < 1:
            return _Choice({})
        ranked = self._ranked(longest)[:max_tokens]
        best, refusal = self._best(num_decodes, ranked)
        if not best:
            return self._trial(num_decodes, ranked, refusal)
        lengths = Counter(answer for _, _, answer in ranked[:best])
        return self._extended(num_decodes, ranked, lengths) or _Choice(dict(lengths))

    def _ranked(self, longest: Mapping[A, int]) -> list[tuple[float, int, A]]:
        """(chance, position, answer) of every candidate, the best ones first."""
        shared: list[float] = []
        before = _FIRST_CHANCE / _NEXT_CHANCE
        for at in range(max(longest.values())):
            before = self._all.chance(at, _NEXT_CHANCE * before)
            shared.append(before)
        ranked = []
        for answer, most in longest.items():
            own, chance = self._of.get(answer, _NEW), 1.0
            for at in range(most):
                chance *= own.chance(at, shared[at])
                ranked.append((chance, at, answer))
        ranked.sort(key=lambda candidate: (-candidate[0], candidate[1]))
        return ranked

    def _best(
        self, num_decodes: int, ranked: list[tuple[float, int, A]]
    ) -> tuple[int, Refusal | None]:
        """Return how many candidates to draft; if none, why the best number does not pay."""
        times = self.times
        refusal: Refusal | None
        plain = times.shape(num_decodes)
        best, best_value = 0, num_decodes / plain * (1 + MARGIN)
        refusal, nearest = None, 0.0
        gain, deepest = float(num_decodes), 0
        for num_rows, (chance, at, _) in enumerate(ranked, 1):
            gain, deepest = gain + chance, max(deepest, at + 1)
            size = num_decodes + num_rows
            seconds = times.shape(size, deepest)
            known = 1.0 if times.is_known(size, deepest) else _UNSURE
            value = gain / (known * seconds)
            if value > best_value:
                best, best_value = num_rows, value
            if value > nearest:
                refusal, nearest = Refusal(size, seconds / plain, gain / num_decodes), value
            most = gain + chance * (len(ranked) - num_rows)  # of any larger step
            if most <= best_value * seconds:
                break
        return best, None if best else refusal

    def _trial(
        self, num_decodes: int, ranked: list[tuple[float, int, A]], refusal: Refusal | None
    ) -> _Choice[A]:
        """Draft one token of one answer if a trial is due and paid for."""
        plain = self.times.shape(num_decodes)
        is_due = self._num_plain >= self._wait and self._saved >= _SAVED_FOR_TRIAL * plain
        if not is_due or self._is_hopeless(num_decodes, ranked):
            return _Choice({}, refusal=refusal)
        chance, _, answer = ranked[0]  # after a failure it is another's turn
        seconds = self.times.shape(num_decodes + 1, 1)
        lost = seconds - plain * (num_decodes + chance) / num_decodes
        return _Choice({answer: 1}, cost=max(lost, _BUDGET * plain))

    def _is_hopeless(self, num_decodes: int, ranked: list[tuple[float, int, A]]) -> bool:
        """Return True if no step would pay though all of its drafts were right, and its time 10 % less.

        Now and then it is doubted, until the size of a trial is known: the table may have been measured
        beside other work.
        """
        times = self.times
        is_doubted = self._num_plain >= HOPELESS_WAIT or times.is_partly_known(num_decodes + 1, 1)
        if is_doubted or not times.is_as_in_table(num_decodes):
            return False
        least = num_decodes / times.shape(num_decodes) * (1 + MARGIN) * (1 - _DOUBT)
        deepest = 0
        for size, (_, at, _) in enumerate(ranked, num_decodes + 1):
            deepest = max(deepest, at + 1)
            if size > least * times.shape(size, deepest):
                return False
        return True

    def _extended(
        self, num_decodes: int, ranked: list[tuple[float, int, A]], lengths: Counter[A]
    ) -> _Choice[A] | None:
        """Now and then a row more, if a step of that size has never been timed: is it as dear as the table says?"""
        size = lengths.total()
        if self._num_drafted % _EXTEND_EVERY or size == len(ranked):
            return None
        chance, at, answer = ranked[size]
        deepest = max(*lengths.values(), at + 1)
        plain = self.times.shape(num_decodes)
        if self._saved < _SAVED_FOR_MORE * plain or self.times.is_known(
            num_decodes + size + 1, deepest
        ):
            return None
        more = self.times.shape(num_decodes + size + 1, deepest) - plain * chance / num_decodes
        lost = max(0.0, more - self.times.shape(num_decodes + size, max(lengths.values())))
        lengths[answer] += 1
        return _Choice(dict(lengths), cost=max(lost, _BUDGET * plain), is_extended=True)
