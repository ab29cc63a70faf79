"""Loads a fast BLAS, with which mlx computes on a Linux CPU.

The Linux wheel of mlx links a reference BLAS (1.5-2.4 GFLOP/s in float32 on a 2-core x86 box). A
shared library that is loaded globally before mlx replaces its symbols: MKL reaches 145 GFLOP/s
there, OpenBLAS 140. macOS needs none of this: Metal computes, and Accelerate is linked.

`machine.prepare` calls `load_blas`. Imports only the standard library, without side effects.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxserve.core.errors import InvalidConfig
from mlxserve.system.extras import package_command

log = logging.getLogger("mlxserve.system.blas")

# MKL's threads spin for 200 ms after each product by default, and on a machine that does anything
# else they take the time of those they wait for: 1,000 prompt tokens of a 100M model took 9.7-11.3 s
# at a load of 4 on 2 cores, and 4.7-8.2 s without spinning. Not to spin at all is dear on a quiet
# machine (small products six times slower); one millisecond bridges the gap to the next product.
_OPENMP_ENVIRONMENT = {"KMP_BLOCKTIME": "1"}

# A symbol of the C BLAS interface: a library without it is not a BLAS.
_BLAS_PROBE = "cblas_sgemm"


class SlowBlasWarning(UserWarning):
    """mlx computes on this machine with its reference BLAS, which is about 70 times slower."""


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that mlx will use. `path` is None if none had to be loaded."""

    name: str
    path: str | None
    is_fast: bool


def is_mlx_imported() -> bool:
    return "mlx.core" in sys.modules


def load_blas() -> Blas:
    """Load the best available BLAS; call it before mlx is imported.

    Raises InvalidConfig if MLXSERVE_BLAS names a library that cannot be used. Warns SlowBlasWarning
    if no fast BLAS is found.
    """
    for name, value in _OPENMP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_mlx_imported():
        warnings.warn(
            "mlx was imported before mlxserve.system.machine.prepare() was called, so it keeps the BLAS it "
            "has, probably its slow reference one. Call prepare() or make the LLM first.",
            SlowBlasWarning,
            stacklevel=3,
        )
        return Blas("the one that was loaded when mlx was imported", None, is_fast=False)
    chosen = os.environ.get("MLXSERVE_BLAS")
    if chosen:
        try:
            return _load("MLXSERVE_BLAS", Path(chosen))
        except OSError as error:
            raise InvalidConfig(
                f"MLXSERVE_BLAS={chosen} cannot be loaded ({error}). Point it at a shared library "
                f"that exports {_BLAS_PROBE}, or unset it."
            ) from error
    for name, path in blas_libraries():
        try:
            return _load(name, path)
        except OSError as error:
            log.debug("%s at %s cannot be loaded: %s", name, path, error)
    warnings.warn(
        "No fast BLAS found: mlx will use its reference BLAS and be about 70 times slower. "
        f"Install one (`{package_command('mkl')}` on x86-64, or `apt-get install libopenblas0-pthread`), "
        "or name one in MLXSERVE_BLAS.",
        SlowBlasWarning,
        stacklevel=3,
    )
    return Blas("mlx's reference BLAS", None, is_fast=False)


def _load(name: str, path: Path) -> Blas:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, _BLAS_PROBE):
        raise OSError(f"{path} does not export {_BLAS_PROBE}")
    return Blas(name, str(path), is_fast=True)


def blas_libraries() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of candidates, best first."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libmkl_rt.so"):
            yield "MKL", Path(str(file.locate()))
    for folder in ("/usr/lib", "/usr/lib64", "/usr/local/lib"):
        for pattern in ("*-linux-gnu/openblas-pthread/libopenblas.so.0", "libopenblas*.so*"):
            for path in sorted(Path(folder).glob(pattern)):
                yield "OpenBLAS", path
