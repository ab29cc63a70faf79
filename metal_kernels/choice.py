"""Which backend computes: what was asked for, what the machine has, what the self-test found."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.cpu.backend import CpuBackend
from metal_kernels.kernels import on_metal
from metal_kernels.metal import MetalBackend, refusal
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.reference import ReferenceBackend
from metal_kernels.selftest import why_not_in_place

log = logging.getLogger("metal_kernels")

BACKENDS = ("auto", "metal", "cpu", "reference")


def select_backend(name: str, layers: Sequence[LayerShape] = ()) -> Backend:
    """The backend of this name, for a model with these layers.

    "auto" is "metal" where there is Metal, its self-test passes and its kernels take every layer,
    and "cpu" elsewhere; the log says which and why. "reference" is the specification, for
    comparisons. Raises ValueError, with advice, for an unknown name and for a backend that cannot
    run here.
    """
    if name not in BACKENDS:
        raise ValueError(f"no attention backend named {name!r}; there are: {', '.join(BACKENDS)}")
    if name == "reference":
        return ReferenceBackend()
    if name == "cpu" or (name == "auto" and not has_metal()):
        return CpuBackend()
    if name == "metal" and not has_metal():
        raise ValueError(
            "there is no Metal on this machine: it needs a Mac with Apple Silicon and an mlx built "
            'for it; use attention_backend="auto" or "cpu"'
        )
    reason = next((why for layer in layers if (why := refusal(*layer)) is not None), None)
    reason = reason or why_not_metal()
    if reason is None:
        log.info("attention by Metal kernels, pools written in place: the self-test passed")
        return MetalBackend(on_metal)
    if name == "metal":
        raise ValueError(reason)
    # Not the reference, which copies every context and casts it to float32. On a GPU this is mlx's
    # fused attention over views of the pool; what only pays on a CPU asks for the device first.
    log.warning("attention by plain mlx, which is slower: %s", reason)
    return CpuBackend()


def has_metal() -> bool:
    """Whether mlx computes on a Mac's GPU; its default device may be the CPU there, too."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


@functools.cache
def why_not_metal() -> str | None:
    """What the self-test found wrong, or None; it runs once per process."""
    return why_not_in_place(MetalBackend(on_metal))
