"""The Metal kernels as backends: on the emulator, and on a Mac's GPU with `-m metal`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.kernels import on_metal
from metal_kernels.metal import MetalBackend
from tests.emulated import emulated_backend, emulated_factory

MACHINES: list[Any] = ["emulator"]
if mx.metal.is_available():
    MACHINES.append(pytest.param("metal", marks=pytest.mark.metal))


@pytest.fixture(scope="session", params=MACHINES)
def checked_backend(request: pytest.FixtureRequest) -> MetalBackend:
    """The kernels with every run-time check of the emulator, whose reports are exceptions."""
    return MetalBackend(on_metal) if request.param == "metal" else emulated_backend(check=True)


@pytest.fixture(scope="session", params=MACHINES)
def backend_without_matrices(request: pytest.FixtureRequest) -> MetalBackend:
    """As `checked_backend`, whose decodes of large groups are those of small ones."""
    factory = on_metal if request.param == "metal" else emulated_factory(check=True)
    return MetalBackend(factory, uses_matrices=False)


@pytest.fixture(scope="session", params=MACHINES)
def fast_backend(request: pytest.FixtureRequest) -> MetalBackend:
    """The kernels without run-time checks."""
    return MetalBackend(on_metal) if request.param == "metal" else emulated_backend()
