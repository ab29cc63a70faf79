"""The doctor's check of attention: Metal's kernels, or the backend without Metal.

Independent of models: `metal_kernels` measures, and this file describes the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mlxserve.doctor.children import run_child
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.sections import first_line, section
from mlxserve.system import machine

if TYPE_CHECKING:
    from metal_kernels.checkup import OpCheck
    from metal_kernels.kernels import Factory
    from metal_kernels.metal import MetalBackend


def check_kernels() -> Iterator[Finding]:
    """Yield each finding as soon as it is known. Imports mlx."""
    machine.prepare()
    from metal_kernels.checkup import check_ops
    from metal_kernels.choice import select_backend
    from metal_kernels.kernels import on_metal
    from metal_kernels.limits import HEAD_DIMS
    from metal_kernels.metal import MetalBackend

    if not machine.is_metal():
        yield Finding("Metal kernels", "not run: there is no Metal on this machine")
        yield from section(
            "ops", lambda: _op_errors(check_ops(select_backend("cpu"), HEAD_DIMS), "the CPU")
        )
        return
    # Each with a backend of its own: what one could not compute must not fail the next.
    yield from section("in-place writes", lambda: [_writes_in_place(MetalBackend(on_metal))])
    yield from section("fences", lambda: _proofs(on_metal))
    yield from section("one op a buffer", _proofs_of_a_child)
    yield from section(
        "ops", lambda: _op_errors(check_ops(MetalBackend(on_metal), HEAD_DIMS), "Metal")
    )
    yield from section("speeds", lambda: _speeds(MetalBackend(on_metal)))
    yield from section("long chunks", _chunks)


def _chunks() -> Iterator[Finding]:
    """Report how long chunks attend here, as it was timed when models were loaded."""
    from mlxserve.model.chunk_choice import kept_times

    times = kept_times().all()
    for label, of_shape in times.items():
        yield Finding("long chunks", f"{label}: {of_shape}")
    if not times:
        value = (
            "by MLX's own routing until a model is loaded: nothing was timed on this machine yet"
        )
        yield Finding("long chunks", value)


def _writes_in_place(backend: MetalBackend) -> Finding:
    from metal_kernels.selftest import why_not_in_place

    name, reason = "in-place writes", why_not_in_place(backend)
    if reason is None:
        value = "every step attended over its own keys while other steps were running"
        return Finding(name, value, Grade.OK)
    value = f"not possible, so attention falls back to plain mlx: {reason}"
    return Finding(name, value, Grade.BROKEN)


def _proofs(factory: Factory) -> Iterator[Finding]:
    """Run the thorough self-test and its control, in every dtype and in 8 bits."""
    from metal_kernels.selftest import prove

    for proof in prove(factory):
        size = f"{proof.load.pool_bytes / 1e6:.0f} MB written {proof.load.steps} times"
        yield _verdict(f"fences {proof.load.label}", size, proof.with_fences, proof.without_fences)


def _proofs_of_a_child() -> Iterator[Finding]:
    """Run the proofs in a child in which mlx commits a command buffer after every op."""
    for proof in run_child("fences", {"MLX_MAX_OPS_PER_BUFFER": "0"}):
        yield _verdict(
            f"fences {proof['dtype']}",
            "one op per command buffer",
            proof["with_fences"],
            proof["without_fences"],
        )


def _verdict(name: str, what: str, with_fences: str | None, without: str | None) -> Finding:
    """Grade a proof: a fact, not a success, if the control passes as well."""
    if with_fences is not None:
        return Finding(name, f"{what}: {with_fences}", Grade.BROKEN)
    if without is None:
        value = f"{what}: right, and right without fences too: this shows nothing on this machine"
        return Finding(name, value)
    return Finding(name, f"{what}: right; without fences, {without}", Grade.OK)


def _op_errors(checks: Iterator[OpCheck], processor: str) -> Iterator[Finding]:
    """Grade ops per dtype, and over pools in 8 bits.

    One finding for the ops that run, and one for each op that does not.
    """
    for (dtype, is_quantised), of_dtype in groupby(
        checks, key=lambda check: (check.dtype, check.is_quantised)
    ):
        checks_of_dtype = list(of_dtype)
        name = str(dtype).removeprefix("mlx.core.") + (" q8" if is_quantised else "")
        if ran := [check for check in checks_of_dtype if check.refusal is None]:
            yield _errors_of(ran, name, processor)
        refused = [check for check in checks_of_dtype if check.refusal is not None]
        for op in dict.fromkeys(check.op for check in refused):
            yield _refusal_of([check for check in refused if check.op == op], name, processor)


def _errors_of(ran: Sequence[OpCheck], dtype: str, processor: str) -> Finding:
    """Report each op's largest error; a wrong op's at each head dimension."""
    parts = []
    wrong = [c for c in ran if not c.is_right]
    for op in dict.fromkeys(check.op for check in ran):
        errors = {c.head_dim: c.error for c in ran if c.op == op}
        if (most := max(errors.values())) == 0:
            parts.append(f"{op} exact")
        elif any(c.op == op for c in wrong):
            by_dim = " ".join(f"{dim}:{error:.0e}" for dim, error in errors.items())
            parts.append(f"{op} off by {by_dim}")
        else:
            parts.append(f"{op} off by {most:.0e}")
    if wrong:
        worst = max(wrong, key=lambda c: c.error)
        parts.append(f"{worst.op} at {worst.head_dim} may be {worst.tolerance:.0e}")
    grade = Grade.BROKEN if wrong else Grade.OK
    return Finding(f"{dtype} ops", f"on {processor}: {', '.join(parts)}", grade)


def _refusal_of(refused: Sequence[OpCheck], dtype: str, processor: str) -> Finding:
    op, dims = refused[0].op, ", ".join(str(check.head_dim) for check in refused)
    value = f"does not run on {processor} in {dtype} at head dimension {dims}: "
    value += first_line(refused[0].refusal or "")
    return Finding(op, value, Grade.BROKEN)


def _speeds(backend: MetalBackend) -> Iterator[Finding]:
    from metal_kernels.speeds import measure

    speeds = measure(backend)
    yield Finding("decode reads", f"{speeds.decode:.0f} GB/s of keys and values")
    yield Finding(
        "page writes",
        f"{speeds.write_pages:.0f} GB/s in whole pages, {speeds.write_tokens:.0f} GB/s row by row: "
        f"{speeds.page_gain:.1f} times",
    )
