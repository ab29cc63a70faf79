"""MatcherHost: the compiler and the matchers of one tokenizer, in a helper process.

Compiling a source and computing a mask may take for ever, or all memory: what a row asks for is
answered before the next row begins, so that the parent knows which one was at work.

    follow([row, row, ...]) ──▶ answer of the first row, answer of the second, ...

Compiling takes place on threads of its own (llguidance releases the GIL): masks of other answers
do not wait for it, nor do grammars that compile quickly for others. Copies of a grammar share its lexer, which grows with the masks that are
computed; 500 repetitions of `a{1000}` take 170 MB.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import psutil

from mlxserve.core.sampling_params import StructureKind
from mlxserve.helpers.fork import forked
from mlxserve.system.owned_cache import OwnedCache
from mlxserve.text.guidance.structures import grammar_text

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_KEPT = 64  # compiled grammars
LOOK_JOBS = 16  # jobs between two checks of the process's size, which take 40 us
KEPT_BYTES = 256 << 20  # growth of the process, beyond which the oldest grammars are dropped
# CPU seconds that one answer's masks may take: at first, and for each token. A usual mask takes
# 0.01 to 1 ms.
FIRST_SECONDS, TOKEN_SECONDS = 2.0, 0.02
FORESEEN_SECONDS = 0.002  # beyond which no further mask of a foreseen token is computed

Source: TypeAlias = tuple[str, str]  # (a StructureKind, the source)
# A matcher's number, its source, whether it begins here and compiles slowly, new tokens, and the API key
# that sent the source: what is kept for one key is not found by another.
Row: TypeAlias = tuple[int, Source, bool, bool, Sequence[int], str]


class RowOutcome(IntEnum):
    """The result of a row."""

    MASK = 0  # (mask of what may follow)
    STOPPED = 1  # the same, and the grammar is complete
    REFUSED = 2  # (why) a token does not fit
    FAILED = 3  # (why) the grammar cannot be compiled, or became too much work
    LATER = 4  # the grammar is being compiled: ask again


class MatcherHost:
    """The helper's jobs: its public methods. Lives in the helper process."""

    def __init__(
        self, tokenizer: str, vocab_size: int, end_ids: Sequence[int], kept_bytes: int = KEPT_BYTES
    ) -> None:
        """tokenizer: the text of a tokenizer.json."""
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids))
        # The masks of all rows of a step become one array, so they have the same size: without the
        # word that llguidance adds if the vocabulary fills its last one.
        self._mask_size = -(-vocab_size // 32) * 4
        self._kept_bytes = kept_bytes
        self._kept = OwnedCache[Source, "LLMatcher"](MAX_KEPT)
        self._compiling: dict[tuple[str, Source], Future[LLMatcher]] = {}
        self._compilers = ThreadPoolExecutor(1, "compiler"), ThreadPoolExecutor(1, "slow-compiler")
        self._open: dict[int, LLMatcher] = {}
        self._seconds: dict[int, float] = {}  # CPU time of an open matcher, less what it may take
        self._num_jobs = 0
        self._has_compiled = False
        self._process = psutil.Process(os.getpid())
        self._first_size = self._size()

    def try_out(self, source: Source, cpu_seconds: float, memory: int) -> tuple[str, str]:
        """Compile and compute the first mask, in a fork limited to these seconds and bytes.

        Returns (a KillReason or "", why the source cannot be used or "").
        """
        return forked(lambda: self.fault(source), cpu_seconds=cpu_seconds, memory=memory)

    def fault(self, source: Source) -> str:
        """Return why the source cannot be used, or "".

        Compiles in this process, and keeps nothing.
        """
        try:
            _follow_first(self._compiled(source))
        except ValueError as error:
            return str(error)
        return ""

    def follow(
        self,
        rows: Sequence[Row],
        forgotten: Sequence[int],
        num_foreseen: int = 0,
        likely: Sequence[Sequence[int]] = (),
    ) -> Iterator[list[object]]:
        """Yield [number, outcome, mask or reason, CPU seconds] of each row, in order.

        forgotten: matchers that are no longer needed
        num_foreseen: maximum number of tokens to foresee, which are appended; the masks after them follow the mask
        likely: of each row, tokens that may follow and are foreseen as far as the grammar allows them
        """
        for number in forgotten:
            self._open.pop(number, None)
            self._seconds.pop(number, None)
        for at, row in enumerate(rows):
            guessed = likely[at] if likely else ()
            began = time.thread_time()
            outcome, result = self._advance(row)
            foreseen: list[int] = []
            if num_foreseen and outcome is RowOutcome.MASK and isinstance(result, bytes):
                foreseen, masks = self._foreseen(row[0], num_foreseen, guessed, began)
                result = b"".join([result, *masks])
            yield [row[0], outcome, result, time.thread_time() - began, *foreseen]
        if self._num_jobs % LOOK_JOBS == 0 or self._has_compiled:
            self._bound()
        self._num_jobs += 1
        self._has_compiled = False

    def num_kept(self) -> int:
        """Number of compiled grammars in memory."""
        return len(self._kept)

    def num_open(self) -> int:
        """Number of matchers of answers."""
        return len(self._open)

    def _advance(self, row: Row) -> tuple[RowOutcome, bytes | str]:
        number, source, is_new, is_slow, tokens, owner = row
        if is_new:
            try:
                kept = self._kept_grammar(owner, source, is_slow=is_slow)
            except ValueError as error:
                return RowOutcome.FAILED, str(error)
            if kept is None:
                return RowOutcome.LATER, ""
            self._open[number] = kept.deep_copy()
            self._seconds[number] = -FIRST_SECONDS
        matcher = self._open[number]
        began = time.thread_time()
        if not matcher.consume_tokens(list(tokens)):
            return RowOutcome.REFUSED, matcher.get_error()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return RowOutcome.FAILED, matcher.get_error()
        if tokens or is_new:  # else it has been paid for, and more tokens are to be foreseen
            self._seconds[number] += time.thread_time() - began - TOKEN_SECONDS * len(tokens)
        if self._seconds[number] > 0:
            return RowOutcome.FAILED, "its masks took too long altogether"
        outcome = RowOutcome.STOPPED if matcher.is_stopped() else RowOutcome.MASK
        return outcome, mask[: self._mask_size]

    def _foreseen(
        self, number: int, max_tokens: int, guessed: Sequence[int], began: float
    ) -> tuple[list[int], list[bytes]]:
        """Return the tokens that must follow, or guessed ones that may, and the mask after each.

        None of them completes the grammar.

        number: the matcher's
        began: processor time when the row's mask was begun
        """
        matcher = self._open[number]
        tokens = (matcher.compute_ff_tokens() or list(guessed))[:max_tokens]
        copy = matcher.deep_copy() if tokens else matcher
        foreseen: list[int] = []
        masks: list[bytes] = []
        for token in tokens:
            is_late = time.thread_time() - began > FORESEEN_SECONDS
            if is_late or not copy.consume_token(token):
                break
            mask = copy.compute_bitmask()
            if copy.is_stopped() or copy.is_error():
                break
            foreseen.append(token)
            masks.append(mask[: self._mask_size])
        return foreseen, masks

    def _kept_grammar(self, owner: str, source: Source, *, is_slow: bool) -> LLMatcher | None:
        """Return a cached grammar; None while it is being compiled. Raises ValueError."""
        known = self._kept.get(owner, source)
        if known is not None:
            return known
        compiling = self._compiling.get((owner, source))
        if compiling is None:
            compiling = self._compilers[is_slow].submit(self._warm, source)
            self._compiling[owner, source] = compiling
        if not compiling.done():
            return None
        del self._compiling[owner, source]
        self._kept.put(owner, source, compiling.result())
        self._has_compiled = True
        return compiling.result()

    def _warm(self, source: Source) -> LLMatcher:
        """Compile a source, including the lexer states that its first mask needs."""
        compiled = self._compiled(source)
        _follow_first(compiled)
        return compiled

    def _compiled(self, source: Source) -> LLMatcher:
        from llguidance import LLMatcher

        kind, text = source
        try:
            grammar = grammar_text(StructureKind(kind), text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot be read: {error}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        _refuse_error(matcher)
        return matcher

    def _bound(self) -> None:
        """Drop the oldest grammars until memory is within its bound."""
        while len(self._kept) and self._size() - self._first_size > self._kept_bytes:
            self._kept.evict()
            _give_back_memory()

    def _size(self) -> int:
        return int(self._process.memory_info().rss)


def _follow_first(compiled: LLMatcher) -> None:
    """Raises ValueError if not even the first mask can be computed."""
    # The lexer says only to the next one that it reached its limit.
    for _ in range(2):
        matcher = compiled.deep_copy()
        matcher.compute_bitmask()
        _refuse_error(matcher)


_NO_TEXT = "no text fits it; a part of it may refer to itself without an end"


def _refuse_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        error = (
            matcher.get_error().partition("\n<state>")[0].strip()
        )  # the parser's counters follow
        words = _NO_TEXT if error == "NoExtensionBias" else error[:500]
        raise ValueError(f"cannot be followed: {words}")


def _give_back_memory() -> None:
    """Return freed memory to the system, which glibc would keep."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
