"""The doctor's look at the attention kernels, which need Metal.

    for name, value, verdict in examine(): ...

Knows nothing of models: `metal_kernels.checkup` does the work, and this file words it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from mlxserve import machine

if TYPE_CHECKING:
    from metal_kernels.checkup import OpCheck
    from metal_kernels.metal import MetalBackend

Line = tuple[str, str, Literal["ok", "BROKEN", ""]]


def examine() -> Iterator[Line]:
    """(name, value, verdict) of each finding, as soon as it is known. Imports mlx."""
    machine.prepare()
    from metal_kernels.checkup import check_ops
    from metal_kernels.kernels import on_metal
    from metal_kernels.metal import MetalBackend
    from metal_kernels.ops import HEAD_DIMS

    if not machine.is_metal():
        yield "Metal kernels", "not run: there is no Metal on this machine", ""
        return
    metal = MetalBackend(on_metal)
    yield from _in_place(metal)
    yield from _described(check_ops(metal, HEAD_DIMS), "Metal")
    yield from _speeds(metal)


def _in_place(backend: MetalBackend) -> Iterator[Line]:
    from metal_kernels.selftest import why_not_in_place

    reason = why_not_in_place(backend)
    if reason is None:
        yield (
            "in-place writes",
            "every step attended over its own keys, with others under way",
            "ok",
        )
    else:
        yield "in-place writes", f"not possible, attention is by plain mlx: {reason}", "BROKEN"


def _described(checks: Iterator[OpCheck], machine: str) -> Iterator[Line]:
    """One line per dtype: each op's largest error, and the head dimensions it was seen at."""
    for dtype, of_dtype in groupby(checks, key=lambda check: check.dtype):
        found = list(of_dtype)
        parts = []
        for op in dict.fromkeys(check.op for check in found):
            errors = {c.head_dim: c.error for c in found if c.op == op}
            if max(errors.values()) == 0:
                parts.append(f"{op} exact")
            else:
                by_dim = " ".join(f"{dim}:{error:.0e}" for dim, error in errors.items())
                parts.append(f"{op} off by {by_dim}")
        wrong = [c for c in found if not c.is_right]
        if wrong:
            worst = max(wrong, key=lambda c: c.error)
            parts.append(f"{worst.op} at {worst.head_dim} may be {worst.tolerance:.0e}")
        name = str(dtype).removeprefix("mlx.core.")
        yield f"{name} ops", f"on {machine}: {', '.join(parts)}", "BROKEN" if wrong else "ok"


def _speeds(backend: MetalBackend) -> Iterator[Line]:
    from metal_kernels.checkup import measure

    speeds = measure(backend)
    yield "decode reads", f"{speeds.decode:.0f} GB/s of keys and values", ""
    yield (
        "page writes",
        f"{speeds.write_pages:.0f} GB/s by whole pages, {speeds.write_tokens:.0f} GB/s by rows: "
        f"{speeds.page_gain:.1f} times",
        "",
    )
