"""Figures of the report file, each measured in a child that may fail alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from mlxserve.doctor.children import ChildFailed, run_child
from mlxserve.doctor.measurement import Measurement
from mlxserve.doctor.sections import first_line
from mlxserve.system import machine

log = logging.getLogger("mlxserve.doctor")

BUFFER_SIZES = (50, 100, 400)  # values of MLX_MAX_MB_PER_BUFFER
_NOT_METAL = "only Metal has command buffers"
# The names of `model_speeds`: what a reader sees, and the unit.
_OF_A_MODEL = {
    "prefill 512": ("prefill of 512 tokens", "tokens/s"),
    "prefill 2048": ("prefill of 2048 tokens", "tokens/s"),
    "decode": ("decode of one answer", "tokens/s"),
    "host": ("CPU time to build a decode's graph", "ms"),
    "peak 512": ("peak memory of a prefill of 512 tokens", "MB"),
    "peak 2048": ("peak memory of a prefill of 2048 tokens", "MB"),
}
# Of `answer_times`: of ours alone.
TIMES_OF_ANSWERS = {
    "load": ("load, with every kernel to compile", "ms"),
    "compile": ("compilation at load", "ms"),
    "first token": ("first token of the first answer", "ms"),
    "fourth token": ("fourth token of the first answer, whose graph is recorded", "ms"),
    "usual token": ("usual time between two tokens", "ms"),
    "first token, warm": ("first token of a later answer", "ms"),
    "first token after a pause": ("first token after a pause of seconds", "ms"),
    "longest gap while the cache grows": (
        "longest gap between two tokens while the cache grows",
        "ms",
    ),
    "decode, whole": ("decode of one answer after the cache has grown", "tokens/s"),
}
# Percent of a token's time: from here on the device waits for the host.
_BOUND_BY_HOST = 60.0
_TOO_SHORT = "the model's context is too short"


def measure(model: str) -> Iterator[Measurement]:
    """Yield every figure as soon as it is measured. Raises nothing: failed ones are absent."""
    for name, part in (
        ("attention", _attention),
        ("model", lambda: _of_the_model(model)),
        ("rows", lambda: _rows(model)),
        ("times", lambda: _times(model)),
        ("command buffers", lambda: _peaks(model)),
    ):
        try:
            yield from part()
        except Exception as error:
            log.debug("the figures of %s failed", name, exc_info=True)
            reason = f"{type(error).__name__}: {first_line(str(error))}"
            yield Measurement(name, "", absent=reason)


def chosen(model: str) -> dict[str, Any]:
    """Limits and sizes that the engine chose for the model, and the log that says why."""
    answer, reason = _ask("chosen", model)
    return {"absent": reason} if answer is None else answer


def _attention() -> Iterator[Measurement]:
    try:
        cards = run_child("attention", {})
    except ChildFailed as error:
        yield Measurement("attention", "GB/s", absent=str(error))
        return
    for fields in cards:
        yield Measurement(**fields)


def _of_the_model(model: str) -> Iterator[Measurement]:
    ours, reason = _ask("ours", model)
    host, host_reason = _ask("host", model)
    theirs, their_reason = _ask("theirs", model)
    ours = {**(ours or {}), **(host or {})}
    theirs = theirs or {}
    for key, (name, unit) in _OF_A_MODEL.items():
        reasons = []
        if key not in ours:
            why = host_reason if key == "host" else reason
            reasons.append(f"mlxserve: {why or _TOO_SHORT}")
        if key not in theirs:
            reasons.append(f"mlx-lm: {their_reason or _TOO_SHORT}")
        absent = "; ".join(reasons) or None
        yield Measurement(name, unit, ours.get(key), theirs.get(key), absent)
    yield _bound_by(ours, theirs, reason or host_reason or "no decode, or no graph")


def _bound_by(ours: Mapping[str, float], theirs: Mapping[str, float], absent: str) -> Measurement:
    """The share of a decode's time in which the host builds its graph, and its meaning.

    absent: why there is no share of ours
    """
    share, their_share = (
        each["host"] * each["decode"] / 10 if "host" in each and "decode" in each else None
        for each in (ours, theirs)
    )
    name = "host's share of a decode"
    if share is None:
        return Measurement(name, "%", None, their_share, f"mlxserve: {absent}")
    bound = "the host" if share >= _BOUND_BY_HOST else "the device"
    return Measurement(f"{name}, which is bound by {bound}", "%", share, their_share)


def _rows(model: str) -> Iterator[Measurement]:
    """Measure steps by their rows, which say whether drafts pay: one of few rows waits for weights."""
    times, reason = _ask("rows", model)
    if times is None:
        yield Measurement("steps by their rows", "ms", absent=reason)
        return
    for num_rows, milliseconds in times.items():
        name = "step of 1 row" if num_rows == "1" else f"step of {num_rows} rows"
        yield Measurement(name, "ms", milliseconds)


def _times(model: str) -> Iterator[Measurement]:
    times, reason = _ask("times", model)
    for key, (name, unit) in TIMES_OF_ANSWERS.items():
        yield Measurement(name, unit, None if times is None else times[key], absent=reason)


def _peaks(model: str) -> Iterator[Measurement]:
    """Measure memory and speed with larger and smaller command buffers, each in a child."""
    for size in BUFFER_SIZES:
        peak, reason = None, _NOT_METAL
        if machine.is_metal():
            peak, why = _ask("ours", model, {"MLX_MAX_MB_PER_BUFFER": str(size)})
            reason = why or _TOO_SHORT
        for key in ("peak 512", "prefill 512", "peak 2048", "prefill 2048"):
            name, unit = _OF_A_MODEL[key]
            value = (peak or {}).get(key)
            absent = reason if value is None else None
            yield Measurement(f"{name}, MLX_MAX_MB_PER_BUFFER={size}", unit, value, absent=absent)


def _ask(
    task: str, model: str, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """Run a task in a child; return (the answer, None), or (None, why there is none)."""
    try:
        return run_child("model", environment or {}, task, model), None
    except ChildFailed as error:
        return None, str(error)
