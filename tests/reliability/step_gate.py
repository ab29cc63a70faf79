"""StepGate: an engine on its own thread makes a step only when the test allows one.

Between two steps the thread goes on answering calls. So the order of calls and steps is the test's, however
the threads are scheduled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlxserve.engine.engine import Engine
from mlxserve.request import Output

_WAIT_SECONDS = 0.0005  # until the engine looks at its inbox again


class StepGate:
    """Of one engine at a time."""

    def __init__(self, when_made: Callable[[], None] = lambda: None) -> None:
        """when_made: called on the engine's thread when the last step that was allowed has been made"""
        self._when_made = when_made
        self.num_steps = 0  # made, over all engines
        self._condition = threading.Condition()
        self._num_allowed = 0
        self._is_stepping = False

    def attach(self, engine: Engine) -> None:
        """From now on its steps wait. `Engine.step` is looked up in each, as a fault may be planted in it."""

        def step() -> list[Output]:
            return self._step(engine)

        engine.step = step  # type: ignore[method-assign]

    @property
    def is_idle(self) -> bool:
        """Whether every step that was allowed has been made."""
        with self._condition:
            return not self._num_allowed and not self._is_stepping

    def allow(self, num_steps: int) -> None:
        with self._condition:
            self._num_allowed += num_steps
            self._condition.notify()

    def close(self) -> None:
        """Allow no more steps."""
        with self._condition:
            self._num_allowed = 0

    def _step(self, engine: Engine) -> list[Output]:
        with self._condition:
            if not self._num_allowed:
                self._condition.wait(_WAIT_SECONDS)
            if not self._num_allowed:
                return []
            self._num_allowed -= 1
            self._is_stepping = True
            self.num_steps += 1
        try:
            return Engine.step(engine)
        finally:
            self._is_stepping = False
            if not self._num_allowed:
                self._when_made()
