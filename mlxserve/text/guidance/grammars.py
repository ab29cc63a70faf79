"""Grammars: tries out structures in helper processes before they are used.

    event loops ──▶ Grammars.compile ──▶ the executor ──▶ helpers "grammars": each try in a fork of its own
    engine      ──▶ Matchers         ──▶ helper "masks": compiles again, and follows the answers

The cost of a source cannot be seen from it. So it is tried with little time first, in the short
lane of the executor, and then with more, in the longer ones: usual schemas take milliseconds, and
never wait for one that takes seconds. A source that used up all of it is refused without another
try for `REFUSED_SECONDS`, and its client's next work goes after that of others.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mlxserve.core.errors import EngineStopped, HelperUnavailable, InvalidParameter
from mlxserve.core.sampling_params import Structure, StructureKind
from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, FairExecutor, Lane, lane_of
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.work import RunsIn, Work
from mlxserve.request import owner_of
from mlxserve.system.owned_cache import OwnedCache
from mlxserve.text.guidance.matchers import Grammar, Matchers
from mlxserve.text.guidance.schemas import narrowed
from mlxserve.text.guidance.structures import MAX_SOURCE, check_schema
from mlxserve.text.tokenizer import Tokenizer

# Processor time to compile a source and compute its first mask: at first, and if that was too little, each
# in another lane of the executor. Usual schemas take 5 ms, 300 properties 25 ms.
TRIES = (0.02, 0.3, 2.0)
COMPILE_BYTES = 512 << 20
MASK_BYTES = 1 << 30  # bytes of all grammars and matchers in use
REFUSED_SECONDS = 60.0
CHARGED_SECONDS = 30.0  # charge for a source that was refused for its work
IDLE_SECONDS = 60.0  # without a new source, until a process that tries them out is ended
MAX_CHECKED = 4096  # sources whose result is known
_HOST = "mlxserve.text.guidance.matcher_host:MatcherHost"
_MARGIN_SECONDS = 3.0  # until a helper ends that does not end its fork


class Grammars:
    """Checks structures for one tokenizer. `compile` may be called from any event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, executor: FairExecutor) -> None:
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self.matchers: Matchers | None = None  # made with the first grammar
        self._tokenizer = tokenizer
        self._executor = executor
        self._helpers: dict[Lane, Helper] = {}
        self._timers: dict[Lane, threading.Timer] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        # Digest of a source -> the seconds in which it compiled; or when to try again, and why not
        # before. By API key: none learns from the time what another has sent.
        self._checked = OwnedCache[bytes, float | tuple[float, str]](MAX_CHECKED)

    async def compile(
        self, structure: Structure, client: str = "", *, limit: int = MAX_SOURCE
    ) -> Grammar:
        """Check a structure and return the grammar that its matchers are made from.

        limit: maximum length of its source in characters

        Raises InvalidParameter, which names the structure's field, QueueFull, HelperUnavailable and
        EngineStopped.
        """
        if len(structure.source) > limit:
            raise InvalidParameter(structure.field, f"is longer than {limit} characters")
        if self._is_closed:
            raise EngineStopped("The engine was closed.")
        took = self._known_seconds(structure, client)
        if took is None:
            took = await self._tried(structure, client)
        assert self.matchers is not None
        return Grammar(structure, self.matchers, client, is_slow=took > TRIES[0])

    def close(self) -> None:
        """Kill the compiling helpers. Matchers must not be used afterwards."""
        with self._lock:
            self._is_closed = True
            for timer in self._timers.values():
                timer.cancel()
        for helper in self._helpers.values():
            helper.close()
        if self.matchers is not None:
            self.matchers.close()

    def _known_seconds(self, structure: Structure, client: str) -> float | None:
        """Seconds that it took to compile. Raises InvalidParameter if it was killed recently."""
        owner, key = owner_of(client), _digest(structure)
        outcome = self._checked.get(owner, key)
        if outcome is None or isinstance(outcome, float):
            return outcome
        until, reason = outcome
        if time.monotonic() < until:
            raise InvalidParameter(structure.field, reason)
        self._checked.drop(owner, key)
        return None

    def _remember(
        self, structure: Structure, client: str, outcome: float | tuple[float, str]
    ) -> None:
        self._checked.put(owner_of(client), _digest(structure), outcome)

    async def _tried(self, structure: Structure, client: str) -> float:
        """Try the structure, and return the seconds that it takes. Raises what `compile` raises."""
        _refuse_schema(structure)
        # A job of the short lane must not wait for the start.
        if not self._is_started:
            start = partial(self._start, structure, client)
            await self._executor.run(client, Work(MEDIUM_SECONDS, start, RunsIn.PROCESS))
        for seconds in TRIES[:-1]:
            try_it = partial(self._try, structure, client, seconds)
            if await self._executor.run(client, Work(seconds, try_it, RunsIn.PROCESS)):
                return seconds
        last_try = partial(self._try, structure, client, TRIES[-1])
        await self._executor.run(client, Work(TRIES[-1], last_try, RunsIn.PROCESS))
        return TRIES[-1]

    def _try(self, structure: Structure, client: str, seconds: float) -> bool:
        """Try to compile it within `seconds`; False if it takes longer.

        Raises InvalidParameter, at the last try also for the time.
        """
        # Another request has asked for the same.
        if self._known_seconds(structure, client) is not None:
            return True
        lane = lane_of(seconds)
        try:
            with self._helper_errors(structure, client):
                killed, fault = self._outcome(structure, lane, seconds)
        finally:
            self._stop_when_idle(lane)
        if not killed:
            if fault:
                raise InvalidParameter(structure.field, fault)
            self._remember(structure, client, seconds)
            return True
        if seconds < TRIES[-1] and killed in (KillReason.TIME, KillReason.PAUSED):
            return False
        if killed == KillReason.PAUSED:
            message = f"{structure.field}: the compiler was paused; send the request again"
            raise HelperUnavailable(message)
        raise self._refused(structure, client, _why_killed(killed))

    def refuse(self, structure: Structure, client: str, reason: str) -> None:
        """Refuse a structure that was too expensive for a while; its client's work goes last."""
        self._remember(structure, client, (time.monotonic() + REFUSED_SECONDS, reason))
        self._executor.charge(client, CHARGED_SECONDS)

    def _outcome(self, structure: Structure, lane: Lane, seconds: float) -> tuple[str, str]:
        """Return what `MatcherHost.try_out` returns. Raises HelperKilled and JobFailed."""
        helper = self._helper(structure, lane)
        source, deadline = _source(structure), _MARGIN_SECONDS + 10 * seconds
        try:
            killed, fault = helper.call("try_out", source, seconds, COMPILE_BYTES, seconds=deadline)
        except HelperKilled as error:
            if error.reason is not KillReason.ENDED:
                raise
            killed, fault = KillReason.ENDED, ""
        if killed == KillReason.ENDED:
            # It may have been ended by the system or an operator: one more try, without a fork.
            return "", str(helper.call("fault", source, seconds=deadline))
        return killed, fault

    def _stop_when_idle(self, lane: Lane) -> None:
        """Stop an idle helper: with a vocabulary of 150,000 it holds 150 MB.

        It starts in a second.
        """
        with self._lock:
            if lane in self._timers:
                self._timers[lane].cancel()
            if not self._is_closed and lane in self._helpers:
                timer = threading.Timer(IDLE_SECONDS, self._stop, [self._helpers[lane]])
                timer.daemon = True
                timer.start()
                self._timers[lane] = timer

    def _stop(self, helper: Helper) -> None:
        with self._lock:
            if not self._is_closed:
                helper.stop_idle()

    @property
    def _is_started(self) -> bool:
        helper = self._helpers.get(Lane.SHORT)
        return helper is not None and helper.is_running

    def _start(self, structure: Structure, client: str) -> None:
        """Start the helper, which takes about a second for a large vocabulary."""
        with self._helper_errors(structure, client):
            self._helper(structure, Lane.SHORT).call("num_open", seconds=_MARGIN_SECONDS)

    def _helper(self, structure: Structure, lane: Lane) -> Helper:
        with self._lock:
            if lane in self._helpers:
                return self._helpers[lane]
        text = self._tokenizer.serialized()
        if text is None:
            raise InvalidParameter(
                structure.field, "needs a tokenizer.json, which this model does not have"
            )
        arguments = (text, self.vocab_size, sorted(self._tokenizer.eos_token_ids))
        with self._lock:
            if self._is_closed:
                raise EngineStopped("The engine was closed.")
            if self.matchers is None:
                masks = Helper(_HOST, *arguments, name="masks", memory=MASK_BYTES)
                # Starts beside the other one; from now on for the engine's thread alone.
                masks.start()
                self.matchers = Matchers(masks, self.vocab_size, self.refuse)
            if lane not in self._helpers:
                self._helpers[lane] = Helper(
                    _HOST,
                    *arguments,
                    name="grammars",
                    memory=COMPILE_BYTES,
                    # Hundredths of a second each: on a busy machine they would wait for seconds.
                    niceness=0 if lane is Lane.SHORT else BEHIND_THE_ENGINE,
                )
            return self._helpers[lane]

    @contextmanager
    def _helper_errors(self, structure: Structure, client: str) -> Iterator[None]:
        """Convert the errors of a helper that ended, or could not do its job."""
        try:
            yield
        except JobFailed as error:
            raise InvalidParameter(structure.field, error.message) from error
        except HelperKilled as error:
            blameless = error.without_blame(f"{structure.field}: the compiler")
            reason = f"cannot be compiled: its compiler {error}"
            raise blameless or self._refused(structure, client, reason) from error

    def _refused(self, structure: Structure, client: str, reason: str) -> InvalidParameter:
        self.refuse(structure, client, reason)
        return InvalidParameter(structure.field, reason)


def _why_killed(reason: str) -> str:
    if reason == KillReason.TIME:
        return f"takes more than {TRIES[-1]:g} s to compile; simplify it"
    return f"needs more than {COMPILE_BYTES >> 20} MB to compile; simplify it"


def _refuse_schema(structure: Structure) -> None:
    """Refuse schemas that need no process to be recognised as invalid."""
    if structure.kind is StructureKind.JSON_SCHEMA:
        try:
            schema = json.loads(structure.source)
            check_schema(schema)
            narrowed(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(structure.field, f"cannot be read: {error}") from error


def _source(structure: Structure) -> tuple[str, str]:
    return structure.kind.value, structure.source


def _digest(structure: Structure) -> bytes:
    text = f"{structure.kind.value}\0{structure.source}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
