"""Sections of the doctor's report: a failing one is a finding, and the next ones still run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from mlxserve.doctor.finding import Finding, Grade

log = logging.getLogger("mlxserve.doctor")

_MAX_LINE = 300


def section(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the section's findings as they come; its exception is the last one.

    The log has the traceback, at level debug.
    """
    try:
        yield from check()
    except Exception as error:
        log.debug("the section %s failed", name, exc_info=True)
        value = f"{type(error).__name__}: {first_line(str(error))}"
        yield Finding(name, value, Grade.BROKEN)


def first_line(text: str) -> str:
    """Return the first non-empty line: a compiler's message has hundreds."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "without a message")[:_MAX_LINE]
