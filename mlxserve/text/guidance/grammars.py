"""Grammars: which structures can be followed, found out in a helper process before they are used.

    event loops ──▶ Grammars.check ──▶ helper "grammars": compiles, computes one mask, keeps nothing
    engine      ──▶ Matchers       ──▶ helper "masks": compiles again, and follows the answers

Two processes, so that a source that has to be killed takes no answer's matcher with it. A source
that had to be killed once is refused without another try for `REFUSED_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from mlxserve.errors import EngineStopped, InvalidParameter
from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.sampling_params import Structure, StructureKind
from mlxserve.text.guidance.matcher_host import KEPT_BYTES
from mlxserve.text.guidance.matchers import Grammar, Matchers
from mlxserve.text.guidance.schemas import narrowed
from mlxserve.text.guidance.structures import MAX_SOURCE, check_schema
from mlxserve.text.tokenizer import Tokenizer

COMPILE_SECONDS = 2.0  # to compile a source, and compute its first mask
COMPILE_BYTES = 512 << 20
MASK_BYTES = 1 << 30  # of all grammars and matchers in use
REFUSED_SECONDS = 60.0
IDLE_SECONDS = 60.0  # without a new source, until the process that tries them out is ended
MAX_CHECKED = 4096  # sources whose result is known
_HOST = "mlxserve.text.guidance.matcher_host:MatcherHost"


class Grammars:
    """Checks structures for one tokenizer. `compile` may be called from any event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self.matchers: Matchers | None = None  # made with the first grammar
        self._tokenizer = tokenizer
        self._helper: Helper | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        # Digest of a source -> when to try again, and why not before; None if it can be followed.
        self._checked: OrderedDict[bytes, tuple[float, str] | None] = OrderedDict()
        # One by one; a place of its own, as these jobs wait.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="mlxserve-grammar")

    async def compile(self, structure: Structure, *, limit: int = MAX_SOURCE) -> Grammar:
        """What the structure's matchers are made from. `limit`: maximum length of its source in
        characters.

        Raises InvalidParameter, which names the structure's field, HelperUnavailable and
        EngineStopped.
        """
        if len(structure.source) > limit:
            raise InvalidParameter(structure.field, f"is longer than {limit} characters")
        if self._is_closed:
            raise EngineStopped("The engine was closed.")
        if not self._is_known(structure):
            _refuse_schema(structure)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, self._check, structure)
        assert self.matchers is not None
        return Grammar(structure, self.matchers)

    def close(self) -> None:
        """Kill what compiles. Matchers must not be used afterwards."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._helper is not None:
            self._helper.close()
        if self.matchers is not None:
            self.matchers.close()

    def _is_known(self, structure: Structure) -> bool:
        """Raises InvalidParameter if it had to be killed not long ago."""
        key = _digest(structure)
        with self._lock:
            if key not in self._checked:
                return False
            found = self._checked[key]
            if found is None:
                self._checked.move_to_end(key)
                return True
            until, reason = found
            if time.monotonic() < until:
                raise InvalidParameter(structure.field, reason)
            del self._checked[key]
            return False

    def _remember(self, structure: Structure, reason: str | None) -> None:
        with self._lock:
            until = time.monotonic() + REFUSED_SECONDS
            self._checked[_digest(structure)] = None if reason is None else (until, reason)
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)

    def _check(self, structure: Structure) -> None:
        """On the thread. Another request may have asked for the same while this one waited."""
        if self._is_known(structure):
            return
        try:
            helper = self._start(structure)
            try:
                helper.call("try_out", _source(structure), seconds=COMPILE_SECONDS)
            except HelperKilled as error:
                if error.reason is not KillReason.ENDED:
                    raise
                # It may have been ended by the system or an operator: one more try.
                helper.call("try_out", _source(structure), seconds=COMPILE_SECONDS)
            if helper.num_grown > KEPT_BYTES:  # not all systems take freed memory back
                helper.stop()
        except JobFailed as error:
            raise InvalidParameter(structure.field, error.message) from error
        except HelperKilled as error:
            raise self._killed(structure, error) from error
        finally:
            self._stop_when_idle()
        self._remember(structure, None)

    def _stop_when_idle(self) -> None:
        """With a vocabulary of 150,000 it has 150 MB in memory, and starts in a second."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if not self._is_closed and self._helper is not None:
                self._timer = threading.Timer(IDLE_SECONDS, self._stop, [self._helper])
                self._timer.daemon = True
                self._timer.start()

    def _stop(self, helper: Helper) -> None:
        with self._lock:
            if not self._is_closed:
                self._threads.submit(helper.stop)  # there, as it would kill a job

    def _start(self, structure: Structure) -> Helper:
        """Takes about a second for a large vocabulary, once."""
        if self._helper is not None:
            return self._helper
        text = self._tokenizer.serialized()
        if text is None:
            raise InvalidParameter(
                structure.field, "needs a tokenizer.json, which this model does not have"
            )
        end_ids = sorted(self._tokenizer.eos_token_ids)
        arguments = (text, self.vocab_size, end_ids)
        with self._lock:
            if self._is_closed:
                raise EngineStopped("The engine was closed.")
            masks = Helper(_HOST, *arguments, name="masks", memory=MASK_BYTES)
            masks.start()  # beside the other one; from now on for the engine's thread alone
            self.matchers = Matchers(masks, self.vocab_size, self._remember)
            self._helper = Helper(
                _HOST,
                *arguments,
                name="grammars",
                memory=COMPILE_BYTES,
                niceness=BEHIND_THE_ENGINE,
            )
        return self._helper

    def _killed(self, structure: Structure, error: HelperKilled) -> Exception:
        if (blameless := error.without_blame(f"{structure.field}: the compiler")) is not None:
            return blameless
        match error.reason:
            case KillReason.TIME:
                reason = f"takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
            case KillReason.MEMORY:
                reason = f"needs more than {COMPILE_BYTES >> 20} MB to compile; simplify it"
            case _:
                reason = f"cannot be compiled: its compiler {error}"
        self._remember(structure, reason)
        return InvalidParameter(structure.field, reason)


def _refuse_schema(structure: Structure) -> None:
    """What needs no process to be refused."""
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
