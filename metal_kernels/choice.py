"""Which backend computes: what was asked for, what the machine has, what the self-test says."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.kernels import on_emulator, on_metal
from metal_kernels.metal import MetalBackend, refusal
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.reference import ReferenceBackend
from metal_kernels.selftest import why_not_in_place

log = logging.getLogger("metal_kernels")

BACKENDS = ("auto", "metal", "reference", "emulator")


def select_backend(name: str, layers: Sequence[LayerShape] = ()) -> Backend:
    """The backend of this name, for a model with these layers.

    "auto" is "metal" where there is Metal, its self-test passes and its kernels take every layer,
    and "reference" elsewhere; the log says which and why. "emulator" runs Metal's kernels on the
    CPU, for development. Raises ValueError, with advice, for an unknown name and for a backend
    that cannot run here.
    """
    if name not in BACKENDS:
        raise ValueError(f"no attention backend named {name!r}; there are: {', '.join(BACKENDS)}")
    if name == "reference" or (name == "auto" and not _has_metal()):
        return ReferenceBackend()
    reason = next((why for layer in layers if (why := refusal(*layer)) is not None), None)
    if name == "auto":
        return _metal_or_reference(reason or _why_not_metal())
    if name == "metal":
        reason = reason or _why_no_metal() or _why_not_metal()
    else:
        reason = reason or _why_no_emulator()
    if reason is not None:
        raise ValueError(reason)
    return MetalBackend(on_metal) if name == "metal" else MetalBackend(on_emulator(), name)


def _metal_or_reference(reason: str | None) -> Backend:
    if reason is None:
        log.info("attention by Metal kernels, pools written in place: the self-test passed")
        return MetalBackend(on_metal)
    log.warning("attention by plain mlx, which is slower: %s", reason)
    return ReferenceBackend()


def _has_metal() -> bool:
    """Also where it exists, somebody may have told mlx to compute on the CPU."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def _why_no_metal() -> str | None:
    if _has_metal():
        return None
    return (
        "there is no Metal on this machine: it needs a Mac with Apple Silicon and an mlx built "
        'for it; use attention_backend="auto" or "reference"'
    )


@functools.cache
def _why_not_metal() -> str | None:
    """The self-test's verdict; once per process."""
    return why_not_in_place(MetalBackend(on_metal))


def _why_no_emulator() -> str | None:
    from metal_kernels.emulator import CompilerNotFound
    from metal_kernels.emulator.toolchain import find_toolchain

    try:
        find_toolchain()
    except CompilerNotFound as error:
        return str(error)
    return None
