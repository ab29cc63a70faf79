"""A pytest plugin: the emulator is the GPU of tests with the mark `metal`, where there is none.

    python -m pytest -p tests.emulated_gpu -m metal

mlx says that it has Metal, builds kernels by the emulator, and answers for its fused attention as a Mac does, so that
a Mac runs no test that has never been run. The thorough self-test gets small loads, and no speed means anything. On a
Mac nothing changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from mlxserve.system import machine

_HEADER: list[str] = []


@pytest.hookimpl(tryfirst=True)  # fixtures ask for Metal when a conftest is imported
def pytest_load_initial_conftests() -> None:
    machine.prepare()
    import mlx.core as mx

    if not mx.metal.is_available():
        _emulate()
        _HEADER.append("metal: the emulator, with small loads")


def pytest_report_header() -> Sequence[str]:
    return _HEADER


def _emulate() -> None:
    """For the life of this process."""
    import mlx.core as mx

    from metal_kernels import kernels, proof_steps, selftest
    from tests.emulated import small_load
    from tests.mac_attention import MacAttention

    thorough, pools = selftest.thorough, BoundPools(kernels.first_page)
    mx.metal.is_available = lambda: True
    mx.fast.metal_kernel = partial(_metal_kernel, pools)
    mx.fast.scaled_dot_product_attention = MacAttention()
    kernels.first_page = pools.first_page
    # Emulated kernels cannot be recorded: the function that would be runs in their place, over whole pools.
    proof_steps.record = lambda step: step
    proof_steps.first_pages = list
    selftest.thorough = lambda dtype, **options: small_load(thorough(dtype, **options))


class BoundPools:
    """The pools whose first pages kernels bind. The emulator would give them no other page."""

    def __init__(self, first_page: Callable[[Any], Any]) -> None:
        self._first_page = first_page
        self._pools: dict[int, weakref.ref[Any]] = {}  # by the ids of views, which live as long

    def first_page(self, pool: Any) -> Any:
        view = self._first_page(pool)
        self._pools[id(view)] = weakref.ref(pool)
        return view

    def whole(self, array: Any) -> Any:
        """The pool of a first page, and any other array itself."""
        pool = self._pools.get(id(array), weakref.ref(array))()
        return array if pool is None else pool


def _metal_kernel(
    pools: BoundPools,
    *,
    name: str,
    input_names: list[str],
    output_names: list[str],
    source: str,
    **options: Any,
) -> Any:
    """As `mx.fast.metal_kernel`; which of its inputs a kernel writes, only the emulator needs to know."""
    from metal_kernels.kernels import ALL
    from tests.emulator import metal_kernel

    writers = [spec.name for spec in ALL if spec.writes_pools]
    kernel = metal_kernel(
        name,
        input_names,
        output_names,
        source,
        **options,
        writable_inputs=("k_pool", "v_pool") if name in writers else (),
    )

    def call(*, inputs: Sequence[Any], **arguments: Any) -> Any:
        return kernel(inputs=[pools.whole(array) for array in inputs], **arguments)

    return call
