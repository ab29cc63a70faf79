"""The figures of the report file: what is measured, each in a child that may fail alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from mlxserve import machine
from mlxserve.doctor.children import ChildFailed, run_child
from mlxserve.doctor.measurement import Measurement
from mlxserve.doctor.sections import first_line

log = logging.getLogger("mlxserve.doctor")

BUFFER_SIZES = (50, 100, 400)  # of MLX_MAX_MB_PER_BUFFER
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
_TOO_SHORT = "the model's context is too short"


def measure(model: str) -> Iterator[Measurement]:
    """Every figure, as soon as it is known. Raises nothing: what fails is absent."""
    for name, part in (
        ("attention", _attention),
        ("model", lambda: _of_the_model(model)),
        ("command buffers", lambda: _peaks(model)),
    ):
        try:
            yield from part()
        except Exception as error:
            log.debug("the figures of %s failed", name, exc_info=True)
            reason = f"{type(error).__name__}: {first_line(str(error))}"
            yield Measurement(name, "", absent=reason)


def chosen(model: str) -> dict[str, Any]:
    """Limits and sizes that the engine chose for the model, and its log, which says why."""
    answer, reason = _ask("chosen", model)
    return {"absent": reason} if answer is None else answer


def _attention() -> Iterator[Measurement]:
    try:
        found = run_child("attention", {})
    except ChildFailed as error:
        yield Measurement("attention", "GB/s", absent=str(error))
        return
    for fields in found:
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


def _peaks(model: str) -> Iterator[Measurement]:
    """Memory and speed where command buffers may hold more or less, each in a process of its own."""
    for size in BUFFER_SIZES:
        found, reason = None, _NOT_METAL
        if machine.is_metal():
            found, why = _ask("ours", model, {"MLX_MAX_MB_PER_BUFFER": str(size)})
            reason = why or _TOO_SHORT
        for key in ("peak 512", "prefill 512", "peak 2048", "prefill 2048"):
            name, unit = _OF_A_MODEL[key]
            value = (found or {}).get(key)
            absent = reason if value is None else None
            yield Measurement(f"{name}, MLX_MAX_MB_PER_BUFFER={size}", unit, value, absent=absent)


def _ask(
    task: str, model: str, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """(the answer, None), or (None, why there is none)."""
    try:
        return run_child("model", environment or {}, task, model), None
    except ChildFailed as error:
        return None, str(error)
