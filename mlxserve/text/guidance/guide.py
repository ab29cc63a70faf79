"""AnswerGuide: what may come next in one answer, known from the tokens it has so far.

    START ──▶ THINKING ──▶ GRAMMAR      the whole answer follows a grammar
          └─────────────────▶
    THINKING ──▶ FREE ◀──▶ CALL         calls of tools follow one once they have begun
               (FORCED ▲)               and may have to begin

Nothing here depends on the past but through the tokens, so an answer that is computed again is
guided the same. After its request is submitted a guide belongs to the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    vocab_size: of the model; masks have a bit for each token
    end_ids: tokens that end the answer
    think_start, think_end: markers, empty for a model that does not think
    may_think: an answer that follows something may think first
    is_thinking: the prompt ends within thinking
    thinking_budget: tokens after which the end of the thinking is forced
    answer: what all behind the thinking follows
    opening: tokens that have to come behind the thinking, where there is no such grammar
    call_start, call: the marker of a call, and what follows it from there on
    call_joins: the token behind the marker tells whether it is one, because it may hold its end
    """

    vocab_size: int
    end_ids: frozenset[int]
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    may_think: bool = True
    is_thinking: bool = False
    thinking_budget: int | None = None
    answer: LLMatcher | None = None
    opening: tuple[int, ...] = ()
    call_start: tuple[int, ...] = ()
    call: LLMatcher | None = None
    call_joins: bool = False


class _Phase(Enum):
    START = auto()
    THINKING = auto()
    FREE = auto()
    CALL = auto()
    GRAMMAR = auto()


class AnswerGuide:
    """One answer's. Masks are little-endian bits, one for each token, in words of 32."""

    def __init__(self, plan: Plan) -> None:
        self.num_read = 0
        self.error: str | None = None  # why the grammar could not be followed to its end
        self._plan = plan
        self._phase = _Phase.THINKING if plan.is_thinking else _Phase.START
        self._matcher: LLMatcher | None = None
        self._num_thought = 0
        self._num_opened = 0  # tokens of `opening`
        self._begun: list[int] = []  # the first tokens, as long as they could open the thinking
        longest = max(len(plan.think_start), len(plan.think_end), len(plan.call_start))
        self._tail: deque[int] = deque(maxlen=longest + 1)
        if self._phase is _Phase.START:
            self._matcher = plan.answer.deep_copy() if plan.answer is not None else None
            if not (plan.think_start and plan.may_think):
                self._leave_thinking()

    def read(self, token_ids: Sequence[int]) -> None:
        """Tokens that were chosen."""
        for token in token_ids:
            self.num_read += 1
            self._tail.append(token)
            self._step(token)

    @property
    def must_wait(self) -> bool:
        """Whether the token after the next one cannot be chosen before that one is known."""
        match self._phase:
            case _Phase.THINKING:
                budget = self._plan.thinking_budget
                is_near = budget is not None and self._num_thought + 1 >= budget
                return self._is_strict or is_near
            case _Phase.FREE:
                is_at_call = self._plan.call_joins and self._ends_with(self._plan.call_start)
                return is_at_call or self._num_opened < len(self._plan.opening)
        return self._phase is not _Phase.START or self._is_strict

    def mask(self) -> bytes | None:
        """The tokens that may come next; None for all."""
        match self._phase:
            case _Phase.START:
                return self._start_mask()
            case _Phase.THINKING:
                return self._thinking_mask()
            case _Phase.FREE:
                left = self._plan.opening[self._num_opened :]
                return self._bits({left[0]}) if left else None
        return self._matcher_mask()

    # ---- what was chosen

    def _step(self, token: int) -> None:
        match self._phase:
            case _Phase.START:
                self._begin(token)
            case _Phase.THINKING:
                self._num_thought += 1
                if self._ends_with(self._plan.think_end):
                    self._leave_thinking()
            case _Phase.FREE:
                self._go_on(token)
            case _Phase.CALL:
                self._follow_call(token)
            case _Phase.GRAMMAR:
                self._follow(token)

    def _begin(self, token: int) -> None:
        """The first tokens open the thinking, or the answer has begun without it."""
        self._begun.append(token)
        begun, marker = tuple(self._begun), self._plan.think_start
        if begun == marker:
            self._phase = _Phase.THINKING
        elif begun == marker[: len(begun)]:
            if self._matcher is not None and not self._matcher.consume_token(token):
                self._matcher = None
        else:
            self._leave_thinking()
            for one in begun:
                self._step(one)

    def _leave_thinking(self) -> None:
        if self._plan.answer is None:
            self._phase = _Phase.FREE
            return
        self._phase = _Phase.GRAMMAR
        self._matcher = self._plan.answer.deep_copy()

    def _go_on(self, token: int) -> None:
        if self._num_opened < len(self._plan.opening):
            self._num_opened += 1
        if self._plan.think_start and self._ends_with(self._plan.think_start):
            self._phase = _Phase.THINKING
        elif (call := self._begun_call(token)) is not None:
            self._phase = _Phase.CALL
            self._matcher = call

    def _begun_call(self, token: int) -> LLMatcher | None:
        """What a call that begins with this token, or behind it, follows."""
        plan = self._plan
        if plan.call is None:
            return None
        if not plan.call_joins:
            return plan.call.deep_copy() if self._ends_with(plan.call_start) else None
        if not self._ends_with(plan.call_start, before=1):
            return None
        call = plan.call.deep_copy()
        return call if call.try_consume_tokens([token]) == 1 else None

    def _follow_call(self, token: int) -> None:
        """A token that was chosen before the marker was known may not fit: the call is free then."""
        assert self._matcher is not None
        if not self._matcher.consume_token(token) or self._matcher.is_stopped():
            self._phase = _Phase.FREE
            self._matcher = None

    def _follow(self, token: int) -> None:
        assert self._matcher is not None
        if self.error is None and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error()

    def _ends_with(self, marker: tuple[int, ...], before: int = 0) -> bool:
        """`before`: so many tokens ago."""
        end = len(self._tail) - before
        return tuple(self._tail)[max(end - len(marker), 0) : end] == marker

    # ---- what may be chosen

    @property
    def _is_strict(self) -> bool:
        """Whether something has to follow the thinking."""
        return self._plan.answer is not None or bool(self._plan.opening)

    def _start_mask(self) -> bytes | None:
        """What opens the thinking, or what has to follow it."""
        if not self._is_strict:
            return None
        begun, opening = tuple(self._begun), self._plan.opening
        at = len(begun)
        ways = {self._plan.think_start[at]}
        if opening[:at] == begun and at < len(opening):
            ways.add(opening[at])
        mask = self._bits(ways)
        return mask if self._matcher is None else _either(self._matcher.compute_bitmask(), mask)

    def _thinking_mask(self) -> bytes | None:
        budget, marker = self._plan.thinking_budget, self._plan.think_end
        if budget is not None and self._num_thought >= budget:
            return self._bits({marker[self._num_closed]})
        if not self._is_strict:
            return None
        return _all_but(self._bits(set(self._plan.end_ids)))

    @property
    def _num_closed(self) -> int:
        """Tokens of the marker that ends the thinking which are there already."""
        marker, tail = self._plan.think_end, tuple(self._tail)
        lengths = range(min(len(marker) - 1, self._num_thought), 0, -1)
        return next((n for n in lengths if tail[-n:] == marker[:n]), 0)

    def _matcher_mask(self) -> bytes | None:
        assert self._matcher is not None
        if self.error is None:
            mask = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return mask
            if self._phase is _Phase.CALL:
                return None
            self.error = self._matcher.get_error()
        return self._bits(set(self._plan.end_ids))

    def _bits(self, token_ids: set[int]) -> bytes:
        mask = bytearray(-(-self._plan.vocab_size // 32) * 4)
        for token in token_ids:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


def _either(mask: bytes, other: bytes) -> bytes:
    value = int.from_bytes(mask, "little") | int.from_bytes(other, "little")
    return value.to_bytes(len(mask), "little")


def _all_but(mask: bytes) -> bytes:
    value = int.from_bytes(mask, "little") ^ ((1 << 8 * len(mask)) - 1)
    return value.to_bytes(len(mask), "little")
