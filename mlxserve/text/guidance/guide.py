"""AnswerGuide: which tokens may come next in one answer, derived from its tokens so far.

    START ──▶ THINKING ──▶ GRAMMAR      the whole answer follows a grammar
          └─────────────────▶
    THINKING ──▶ FREE ◀──▶ CALL         a tool call follows a grammar once it has started,
               (FORCED ▲)               and may be forced to start

The state depends on the tokens alone, so a recomputed answer is guided identically. Matchers are in
another process, which answers later: until then, tokens whose meaning depends on its answer wait.
Once its request is submitted, a guide belongs to the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

from mlxserve.text.guidance.matcher_host import RowOutcome
from mlxserve.text.guidance.matchers import MAX_FORESEEN, Grammar, Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The constraints of one answer.

    vocab_size: the model's; a mask has one bit per token
    end_ids: tokens that end the answer
    think_start, think_end: thinking markers; empty for a model that does not think
    think_ends: tokens that the tokenizer may write for the last one of `think_end`, merged with
        what follows it
    may_think: a constrained answer may think first
    is_thinking: the prompt ends inside thinking
    blanks: tokens of white space, which may precede thinking
    thinks_anywhere: the opening marker means thinking also after text
    thinking_budget: number of tokens after which thinking is forced to end
    answer: grammar of everything after the thinking
    opening: tokens forced after the thinking, if there is no such grammar
    call_start, call: the marker of a call, and the grammar of what follows it
    quotes: tokens that end in a quote, after which the marker is part of a text
    call_joins: only the token after the marker shows whether it is one, because the tokenizer may
        merge the marker's end with what follows
    """

    vocab_size: int
    end_ids: frozenset[int]
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    think_ends: frozenset[int] = frozenset()
    may_think: bool = True
    is_thinking: bool = False
    blanks: frozenset[int] = frozenset()
    thinks_anywhere: bool = False
    thinking_budget: int | None = None
    answer: Grammar | None = None
    opening: tuple[int, ...] = ()
    call_start: tuple[int, ...] = ()
    call: Grammar | None = None
    quotes: frozenset[int] = frozenset()
    call_joins: bool = False

    def mask_of(self, token_ids: Collection[int]) -> bytes:
        """Return the mask that allows these tokens alone."""
        mask = bytearray(-(-self.vocab_size // 32) * 4)
        for token in token_ids:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


_WAIT_SECONDS = 0.1


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
        self._matcher: Matcher | None = None
        # Foreseen without a grammar, each with the mask after it.
        self._ahead: list[tuple[int, bytes | None]] = []
        self._unstepped: deque[int] = deque()  # read, but waiting for the matcher's answer
        self._num_thought = 0
        self._num_opened = 0  # tokens of `opening` seen
        # Tokens since the last thinking or call, without white space.
        self._num_said = 0
        self._begun: list[int] = []  # first tokens, while they may be the opening thinking marker
        longest = max(len(plan.think_start), len(plan.think_end), len(plan.call_start))
        self._tail: deque[int] = deque(maxlen=longest + 2)
        if self._phase is _Phase.START:
            self._matcher = plan.answer.open() if plan.answer is not None else None
            if not (plan.think_start and plan.may_think):
                self._leave_thinking()

    def read(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens that were sampled."""
        self.num_read += len(token_ids)
        self._ahead = self._ahead if not token_ids else []
        self._unstepped.extend(token_ids)
        self._advance()

    def expect(self, likely: Sequence[int]) -> None:
        """Foresee these tokens, as far as the grammar allows them after those read.

        A mask that is known already is not until the next answer.
        """
        if self.is_free:
            self._ahead = copy(self).walk(likely)
        elif self._matcher is not None and not self._unstepped:
            self._matcher.expect(likely)

    def ask(self) -> None:
        """Request the mask, together with those of all guides that have read tokens."""
        if self._matcher is not None:
            self._matcher.ask()
            self._advance()

    @property
    def is_ready(self) -> bool:
        """True if the mask is known; requests it and waits as long as a step may be held up."""
        while self._matcher is not None and self._matcher.wait_briefly():
            matcher = self._matcher
            self._advance()
            if self._matcher is matcher and matcher.is_settled:
                return True
        return self._matcher is None

    def wait(self, seconds: float) -> None:
        """Wait for the mask."""
        if self._matcher is not None:
            self._matcher.wait(seconds)
            self._advance()

    @property
    def must_wait(self) -> bool:
        """True if sampling the token after the next requires knowing the next one."""
        if self._unstepped:
            return True
        match self._phase:
            case _Phase.THINKING:
                budget = self._plan.thinking_budget
                is_near = budget is not None and self._num_thought + 1 >= budget
                return self._is_strict or is_near
            case _Phase.FREE:
                is_at_call = self._plan.call_joins and self._ends_with(self._plan.call_start)
                return is_at_call or self._num_opened < len(self._plan.opening)
        return self._phase is not _Phase.START or self._is_strict

    def foresee(self, num_tokens: int) -> None:
        for grammar in (self._plan.answer, self._plan.call):
            if grammar is not None:
                grammar.matchers.num_foreseen = min(num_tokens, MAX_FORESEEN)

    @property
    def foreseen(self) -> Sequence[int]:
        """Tokens whose masks are known: those that the grammar forces, or likely ones that it allows.

        () while its answer covers not all tokens.
        """
        if self.is_free:
            return [token for token, _ in self._ahead]
        return self._matcher.foreseen if self._matcher is not None and self.can_follow else ()

    @property
    def is_free(self) -> bool:
        """True if no grammar is followed: while the answer thinks, and in text that a call may follow."""
        if self._matcher is not None or self._unstepped:
            return False
        is_opened = self._num_opened >= len(self._plan.opening)
        return self._phase is _Phase.THINKING or (self._phase is _Phase.FREE and is_opened)

    def walk(self, token_ids: Sequence[int]) -> list[tuple[int, bytes | None]]:
        """Step a copy of a free guide through tokens, up to the first one that a grammar follows.

        Returns each with the mask after it.
        """
        self._tail, self._begun = self._tail.copy(), [*self._begun]
        walked: list[tuple[int, bytes | None]] = []
        for token in token_ids:
            self._tail.append(token)
            self._step(token)
            if not self.is_free:
                break
            walked.append((token, self.mask()))
        return walked

    @property
    def can_follow(self) -> bool:
        """True if all tokens are in a grammar that goes on."""
        matcher = self._matcher
        if matcher is None or self._unstepped or not matcher.is_settled:
            return False
        is_followed = self._phase in (_Phase.CALL, _Phase.GRAMMAR)
        return is_followed and matcher.outcome is RowOutcome.MASK

    def mask(self, num_foreseen: int = 0) -> bytes | None:
        """Mask of the tokens that may come next; None allows all, or is not known. Waits for the first.

        num_foreseen: of the `foreseen` tokens, how many come before
        """
        if num_foreseen:
            masks: Sequence[bytes | None] = [mask for _, mask in self._ahead]
            if self._matcher is not None:
                masks = self._matcher.foreseen_masks
            return masks[num_foreseen - 1] if num_foreseen <= len(masks) else None
        while not self.is_ready:
            self.wait(_WAIT_SECONDS)
        match self._phase:
            case _Phase.START:
                return self._start_mask()
            case _Phase.THINKING:
                return self._thinking_mask()
            case _Phase.FREE:
                left = self._plan.opening[self._num_opened :]
                return self._plan.mask_of({left[0]}) if left else None
        return self._matcher_mask()

    # ---- tokens that were sampled

    def _advance(self) -> None:
        """Step through the tokens as far as the matcher has answered."""
        self._settle()
        while self._unstepped and self._can_step:
            token = self._unstepped.popleft()
            self._tail.append(token)
            self._step(token)
            self._settle()

    @property
    def _can_step(self) -> bool:
        """False at the end of a call whose grammar is undecided: what follows depends on it."""
        matcher = self._matcher
        return (
            self._phase is not _Phase.CALL
            or matcher is None
            or matcher.is_settled
            or not matcher.tokens
        )

    def _settle(self) -> None:
        """Apply the matcher's answer."""
        matcher = self._matcher
        if matcher is None or not matcher.is_settled:
            return
        if matcher.is_lost:
            self.error = matcher.error
        elif self._phase is _Phase.CALL:
            # A token sampled before the marker was known may not fit; the call is then
            # unconstrained.
            if matcher.outcome is not RowOutcome.MASK:
                self._phase, self._matcher, self._num_said = _Phase.FREE, None, 0
        elif self._phase is _Phase.START and matcher.outcome is RowOutcome.REFUSED:
            # Only thinking can begin like this.
            self._matcher = None
        else:
            self.error = matcher.error

    def _step(self, token: int) -> None:
        match self._phase:
            case _Phase.START:
                self._begin(token)
            case _Phase.THINKING:
                self._num_thought += 1
                if self._has_closed:
                    self._leave_thinking()
            case _Phase.FREE:
                self._step_freely(token)
            case _Phase.CALL | _Phase.GRAMMAR:
                assert self._matcher is not None
                self._matcher.consume(token)

    def _begin(self, token: int) -> None:
        """Classify the first tokens: they open thinking, or the answer starts without any."""
        self._begun.append(token)
        begun, marker = tuple(self._begun), self._plan.think_start
        if begun == marker:
            self._phase, self._matcher = _Phase.THINKING, None
        elif begun == marker[: len(begun)]:
            if self._matcher is not None:
                self._matcher.consume(token)
        else:
            self._leave_thinking()
            for each in begun:
                self._step(each)

    @property
    def _has_closed(self) -> bool:
        """True if the tokens end with the marker that ends thinking."""
        end, last = self._plan.think_end, self._tail[-1]
        if last in self._plan.think_ends:
            return self._ends_with(end[:-1], before=1)
        return self._ends_with(end)

    def _leave_thinking(self) -> None:
        if self._plan.answer is None:
            self._phase, self._num_said = _Phase.FREE, 0
            return
        self._phase = _Phase.GRAMMAR
        if self._matcher is None or self._matcher.tokens:
            self._matcher = self._plan.answer.open()

    def _step_freely(self, token: int) -> None:
        if self._num_opened < len(self._plan.opening):
            self._num_opened += 1
        self._num_said += token not in self._plan.blanks
        if self._thinks_again:
            self._phase = _Phase.THINKING
        elif (call := self._begun_call(token)) is not None:
            self._phase = _Phase.CALL
            self._matcher = call

    @property
    def _thinks_again(self) -> bool:
        """True if the tokens end with a marker that opens thinking; elsewhere it is text."""
        plan, marker = self._plan, self._plan.think_start
        if not marker or not self._ends_with(marker):
            return False
        length = sum(token not in plan.blanks for token in marker)
        return plan.thinks_anywhere or self._num_said == length

    def _begun_call(self, token: int) -> Matcher | None:
        """The grammar of a call that starts with or after this token; None if none does.

        If calls join their marker, it may still refuse the token.
        """
        plan, before = self._plan, int(self._plan.call_joins)
        if plan.call is None or not self._ends_with(plan.call_start, before):
            return None
        earlier = tuple(self._tail)[: -len(plan.call_start) - before]
        if earlier and earlier[-1] in plan.quotes:
            return None
        return plan.call.open([token] if plan.call_joins else ())

    def _ends_with(self, marker: tuple[int, ...], before: int = 0) -> bool:
        """True if the tokens, except the last `before`, end with `marker`."""
        end = len(self._tail) - before
        return tuple(self._tail)[max(end - len(marker), 0) : end] == marker

    # ---- tokens that may be sampled

    @property
    def _is_strict(self) -> bool:
        """True if what follows the thinking is constrained."""
        return self._plan.answer is not None or bool(self._plan.opening)

    def _start_mask(self) -> bytes | None:
        """Mask for the start: what opens the thinking, or what must follow it."""
        if not self._is_strict:
            return None
        begun, opening = tuple(self._begun), self._plan.opening
        at = len(begun)
        ways = {self._plan.think_start[at]}
        if opening[:at] == begun and at < len(opening):
            ways.add(opening[at])
        mask = self._plan.mask_of(ways)
        if self._matcher is None:
            return mask
        if self.error is not None:
            return self._plan.mask_of(self._plan.end_ids)
        return _either(self._matcher.mask, mask)

    def _thinking_mask(self) -> bytes | None:
        budget, marker = self._plan.thinking_budget, self._plan.think_end
        if budget is not None and self._num_thought >= budget:
            return self._plan.mask_of({marker[self._num_closed]})
        if not self._is_strict:
            return None
        return _all_but(self._plan.mask_of(self._plan.end_ids))

    @property
    def _num_closed(self) -> int:
        """Number of tokens of the closing marker that are sampled already."""
        marker, tail = self._plan.think_end, tuple(self._tail)
        lengths = range(min(len(marker) - 1, self._num_thought), 0, -1)
        return next((n for n in lengths if tail[-n:] == marker[:n]), 0)

    def _matcher_mask(self) -> bytes:
        assert self._matcher is not None
        if self.error is not None:
            return self._plan.mask_of(self._plan.end_ids)
        return self._matcher.mask


def _either(mask: bytes, other: bytes) -> bytes:
    value = int.from_bytes(mask, "little") | int.from_bytes(other, "little")
    return value.to_bytes(len(mask), "little")


def _all_but(mask: bytes) -> bytes:
    value = int.from_bytes(mask, "little") ^ ((1 << 8 * len(mask)) - 1)
    return value.to_bytes(len(mask), "little")
