"""AnswerGuide: which tokens may come next in one answer, derived from its tokens so far.

    START ──▶ THINKING ──▶ GRAMMAR      the whole answer follows a grammar
          └─────────────────▶
    THINKING ──▶ FREE ◀──▶ CALL         a tool call follows a grammar once it has started,
               (FORCED ▲)               and may be forced to start

The state depends on the tokens alone, so a recomputed answer is guided identically. Once its
request is submitted, a guide belongs to the engine's thread.
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
    """What guides one answer.

    vocab_size: the model's; a mask has one bit per token
    end_ids: tokens that end the answer
    think_start, think_end: thinking markers; empty for a model that does not think
    may_think: a constrained answer may think first
    is_thinking: the prompt ends inside thinking
    thinking_budget: number of tokens after which thinking is forced to end
    answer: grammar of everything after the thinking
    opening: tokens forced after the thinking, if there is no such grammar
    call_start, call: the marker of a call, and the grammar of what follows it
    call_joins: only the token after the marker shows whether it is one, because the tokenizer may
        merge the marker's end with what follows
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
    """Guides one answer. Masks have one bit per token, little-endian, in words of 32 bits."""

    def __init__(self, plan: Plan) -> None:
        self.num_read = 0
        self.error: str | None = None  # why the grammar could not be completed
        self._plan = plan
        self._phase = _Phase.THINKING if plan.is_thinking else _Phase.START
        self._matcher: LLMatcher | None = None
        self._num_thought = 0
        self._num_opened = 0  # tokens of `opening` seen
        self._begun: list[int] = []  # first tokens, while they may be the opening thinking marker
        longest = max(len(plan.think_start), len(plan.think_end), len(plan.call_start))
        self._tail: deque[int] = deque(maxlen=longest + 1)
        if self._phase is _Phase.START:
            self._matcher = plan.answer.deep_copy() if plan.answer is not None else None
            if not (plan.think_start and plan.may_think):
                self._leave_thinking()

    def read(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens that were sampled."""
        for token in token_ids:
            self.num_read += 1
            self._tail.append(token)
            self._step(token)

    @property
    def must_wait(self) -> bool:
        """Whether sampling the token after the next requires knowing the next one."""
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
        """Mask of the tokens that may come next; None allows all."""
        match self._phase:
            case _Phase.START:
                return self._start_mask()
            case _Phase.THINKING:
                return self._thinking_mask()
            case _Phase.FREE:
                left = self._plan.opening[self._num_opened :]
                return self._bits({left[0]}) if left else None
        return self._matcher_mask()

    # ---- tokens that were sampled

    def _step(self, token: int) -> None:
        match self._phase:
            case _Phase.START:
                self._begin(token)
            case _Phase.THINKING:
                self._num_thought += 1
                if self._ends_with(self._plan.think_end):
                    self._leave_thinking()
            case _Phase.FREE:
                self._step_freely(token)
            case _Phase.CALL:
                self._follow_call(token)
            case _Phase.GRAMMAR:
                self._follow(token)

    def _begin(self, token: int) -> None:
        """The first tokens open the thinking, or the answer has started without any."""
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

    def _step_freely(self, token: int) -> None:
        if self._num_opened < len(self._plan.opening):
            self._num_opened += 1
        if self._plan.think_start and self._ends_with(self._plan.think_start):
            self._phase = _Phase.THINKING
        elif (call := self._begun_call(token)) is not None:
            self._phase = _Phase.CALL
            self._matcher = call

    def _begun_call(self, token: int) -> LLMatcher | None:
        """The grammar of a call that starts with or after this token; None if none does."""
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
        """A token sampled before the marker was known may not fit; the call is then unconstrained."""
        assert self._matcher is not None
        if not self._matcher.consume_token(token) or self._matcher.is_stopped():
            self._phase = _Phase.FREE
            self._matcher = None

    def _follow(self, token: int) -> None:
        assert self._matcher is not None
        if self.error is None and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error()

    def _ends_with(self, marker: tuple[int, ...], before: int = 0) -> bool:
        """Whether the tokens, except the last `before`, end with `marker`."""
        end = len(self._tail) - before
        return tuple(self._tail)[max(end - len(marker), 0) : end] == marker

    # ---- tokens that may be sampled

    @property
    def _is_strict(self) -> bool:
        """Whether what follows the thinking is constrained."""
        return self._plan.answer is not None or bool(self._plan.opening)

    def _start_mask(self) -> bytes | None:
        """What opens the thinking, or what must follow it."""
        if not self._is_strict:
            return None
        begun, opening = tuple(self._begun), self._plan.opening
        at = len(begun)
        ways = {self._plan.think_start[at]}
        if opening[:at] == begun and at < len(opening):
            ways.add(opening[at])
        mask = self._bits(ways)
        return mask if self._matcher is None else _either(self._matched(self._matcher), mask)

    def _thinking_mask(self) -> bytes | None:
        budget, marker = self._plan.thinking_budget, self._plan.think_end
        if budget is not None and self._num_thought >= budget:
            return self._bits({marker[self._num_closed]})
        if not self._is_strict:
            return None
        return _all_but(self._bits(set(self._plan.end_ids)))

    @property
    def _num_closed(self) -> int:
        """How many tokens of the marker that ends the thinking were sampled already."""
        marker, tail = self._plan.think_end, tuple(self._tail)
        lengths = range(min(len(marker) - 1, self._num_thought), 0, -1)
        return next((n for n in lengths if tail[-n:] == marker[:n]), 0)

    def _matcher_mask(self) -> bytes | None:
        assert self._matcher is not None
        if self.error is None:
            mask = self._matched(self._matcher)
            if not self._matcher.is_error():
                return mask
            if self._phase is _Phase.CALL:
                return None
            self.error = self._matcher.get_error()
        return self._bits(set(self._plan.end_ids))

    def _matched(self, matcher: LLMatcher) -> bytes:
        """Without the word that llguidance adds if the vocabulary fills its last one.

        The masks of all rows of a step become one array, so they have the same size.
        """
        return matcher.compute_bitmask()[: self._mask_size]

    @property
    def _mask_size(self) -> int:
        return -(-self._plan.vocab_size // 32) * 4

    def _bits(self, token_ids: set[int]) -> bytes:
        mask = bytearray(self._mask_size)
        for token in token_ids:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


def _either(mask: bytes, other: bytes) -> bytes:
    value = int.from_bytes(mask, "little") | int.from_bytes(other, "little")
    return value.to_bytes(len(mask), "little")


def _all_but(mask: bytes) -> bytes:
    value = int.from_bytes(mask, "little") ^ ((1 << 8 * len(mask)) - 1)
    return value.to_bytes(len(mask), "little")
