"""Calls from other threads, which the engine's thread runs between two steps."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.core.errors import EngineFailed, EngineStopped, MlxServeError

if TYPE_CHECKING:
    from mlxserve.engine.engine import Engine

log = logging.getLogger("mlxserve.engine")

_HEARTBEAT = 1.0  # seconds between two signs of life of an idle engine


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A function to run on the engine's thread, and the future of its result."""

    work: Callable[[Engine], Any]
    result: Future[Any]

    def run(self, engine: Engine) -> Exception | None:
        """Run the call, and return an error after which the engine needs an audit, or None.

        That is an error that no caller expects, or a refusal after which requests or pages differ.
        It is another object than the caller's: a restart clears the frames of its traceback, and
        clearing those of the coroutine in which the caller's is raised would end it.
        """
        if not self.result.set_running_or_notify_cancel():
            return None
        try:
            before = engine.mark()
            result = self.work(engine)
        except MlxServeError as error:
            self.result.set_exception(error)
            if engine.mark() != before:
                return AssertionError(f"requests or pages differ after a refusal: {error}")
        except AssertionError as error:
            self.result.set_exception(_copy_of(error))
            return error
        except Exception as error:
            log.exception("A call of the engine failed")
            self.result.set_exception(EngineFailed.because_of(error))
            return error
        except BaseException as error:
            self.result.set_exception(EngineFailed.because_of(error))
            raise
        else:
            self.result.set_result(result)
        return None

    def refuse(self, reason: EngineStopped) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(reason)


def _copy_of(error: AssertionError) -> AssertionError:
    copy = AssertionError(*error.args)
    copy.__cause__ = error
    return copy


def audit(engine: Engine, error: Exception, awaited: Collection[str] | None = None) -> None:
    """Check the engine after a call that failed, perhaps half done. Raises what the check finds.

    awaited: as in `Engine.check`
    """
    try:
        engine.check(awaited)
    except Exception as found:
        raise found from error


class Inbox:
    """Takes calls from any thread, until it is closed."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()
        self._closed: EngineStopped | None = None

    def put(self, work: Callable[[Engine], Any]) -> Future[Any]:
        """Run `work` at the next step boundary."""
        call = EngineCall(work, Future())
        self._calls.put(call)
        if self._closed is not None:
            # The thread no longer reads its calls.
            self._refuse(self._closed)
        return call.result

    def tell(self, work: Callable[[Engine], Any]) -> None:
        """Run `work` as `put` does, without a result. Errors are logged, unless the engine has ended.

        No caller waits for it, so counters show its effect after the next step. The pages of an
        aborted request are free once the step that uses them was read.
        """

        def report(done: Future[Any]) -> None:
            if (error := done.exception()) and not isinstance(error, EngineStopped):
                log.error("A call of the engine that has no caller failed: %s", error)

        self.put(work).add_done_callback(report)

    def end(self) -> None:
        """End the engine after the calls before this one."""
        self._calls.put(None)

    def run_calls(
        self, engine: Engine, awaited: Callable[[], Collection[str]], *, is_busy: bool
    ) -> bool:
        """Run the waiting calls on the engine's thread; False if the engine is to end.

        awaited: ids of the requests that callers wait for
        is_busy: do not wait for a call
        """
        try:
            call = self._calls.get_nowait() if is_busy else self._calls.get(timeout=_HEARTBEAT)
            while call is not None:
                if (error := call.run(engine)) is not None:
                    audit(engine, error, awaited())
                call = self._calls.get_nowait()
        except queue.Empty:
            return True
        return False

    def close(self, reason: EngineStopped) -> None:
        """Refuse all calls from now on."""
        self._closed = reason
        self._refuse(reason)

    def _refuse(self, reason: EngineStopped) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.refuse(reason)
