"""Chooses the backend of each layer.

The choice depends on the requested name, the machine, the self-test and the shapes that the kernels
take.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.draft_check import why_not_together
from metal_kernels.kernels import on_metal
from metal_kernels.limits import BACKENDS
from metal_kernels.metal import MetalBackend
from metal_kernels.ops import Backend, LayerShape
from metal_kernels.plain import PlainBackend
from metal_kernels.reference import ReferenceBackend
from metal_kernels.refusals import refusal
from metal_kernels.selftest import QUICK_GROUP, QUICK_Q8, QUICK_WAYS, why_not_in_place
from metal_kernels.step_ways import StepWay

log = logging.getLogger("metal_kernels")

_ANY = LayerShape(128, 128, mx.float16)  # accepted by every backend


def select_backend(name: str) -> Backend:
    """Return the backend of this name, for layers of any shape that it takes.

    See `select_backends`.
    """
    (backend,) = select_backends(name, [_ANY])
    return backend


def select_backends(name: str, layers: Sequence[LayerShape]) -> tuple[Backend, ...]:
    """Return the backend of each layer; layers with the same one share the object.

    "auto" is "metal" where there is Metal, its self-test passes and its kernels take the layer, and
    "cpu" elsewhere; the log says which and why. "reference" is the specification, for comparisons.
    Raises ValueError, with advice, for an unknown name and for a backend that cannot run here or
    not for every layer.
    """
    if name not in BACKENDS:
        raise ValueError(f"no attention backend named {name!r}; there are: {', '.join(BACKENDS)}")
    if name == "reference":
        return (ReferenceBackend(),) * len(layers)
    if name == "cpu" or (name == "auto" and not has_metal()):
        return (_plain(),) * len(layers)
    if name == "metal" and not has_metal():
        raise ValueError(
            "there is no Metal on this machine: it needs a Mac with Apple Silicon and an mlx built "
            'for it; use attention_backend="auto" or "cpu"'
        )
    reasons = [refusal(*layer) for layer in layers]
    is_quantised = any(layer.is_quantised for layer in layers)
    if None in reasons and (failure := why_not_metal(is_quantised=is_quantised)) is not None:
        reasons = [failure] * len(layers)
    refused = [reason for reason in reasons if reason is not None]
    if refused and name == "metal":
        raise ValueError(refused[0])
    if refused:
        # Not the reference, which copies every context and casts it to float32. On a GPU this is
        # mlx's fused attention over views of the pool; what only pays on a CPU asks for the device.
        which = "" if len(refused) == len(layers) else f" of {len(refused)} of {len(layers)} layers"
        why = "; ".join(dict.fromkeys(refused))
        log.warning("attention%s by plain mlx, which is slower: %s", which, why)
    if len(refused) < len(layers):
        which = f" of {len(layers) - len(refused)} layers" if refused else ""
        log.info(
            "attention%s by Metal kernels, pools written in place: the self-test passed", which
        )
    plain = _plain()
    if len(refused) == len(layers):
        return (plain,) * len(layers)
    metal = MetalBackend(
        on_metal,
        uses_matrices=has_matrices(),
        joins_drafts=joins_drafts(),
        without=refused_ways(),
    )
    return tuple(metal if reason is None else plain for reason in reasons)


def has_metal() -> bool:
    """True if mlx computes on a Mac's GPU; its default device may be the CPU there, too."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def _plain() -> PlainBackend:
    """Return the plain mlx backend that is fastest on this device."""
    if not is_linux_cpu():
        return PlainBackend()
    # A Mac does not import it.
    from metal_kernels.x86.backend import X86Backend

    return X86Backend()


def is_linux_cpu() -> bool:
    """True if mlx computes on a CPU with its Linux wheel, which vectorises little."""
    return sys.platform != "darwin" and bool(mx.default_device() == mx.cpu)


@functools.cache
def why_not_metal(*, is_quantised: bool = False) -> str | None:
    """Return the self-test's error, or None; it runs once per process, and once in 8 bits."""
    reason = why_not_in_place(MetalBackend(on_metal))
    if reason is not None or not is_quantised:
        return reason
    return why_not_in_place(MetalBackend(on_metal), QUICK_Q8)


@functools.cache
def has_matrices() -> bool:
    """True if the kernel for many query heads per kv head passes its self-test.

    Other kernels take such decodes, too, so a failure is only a warning.
    """
    reason = why_not_in_place(MetalBackend(on_metal), QUICK_GROUP)
    if reason is not None:
        log.warning(
            "decodes with many query heads per kv head without matrices, which is slower: %s",
            reason,
        )
    return reason is None


@functools.cache
def joins_drafts() -> bool:
    """True if rows of a draft that are read together have the bits that each has alone.

    They are decoded a row at a time otherwise, so a failure is only a warning.
    """
    reason = why_not_together(MetalBackend(on_metal))
    if reason is not None:
        log.warning("rows of drafts read their pages one by one, which is slower: %s", reason)
    return reason is None


@functools.cache
def refused_ways() -> frozenset[StepWay]:
    """Ways of steps that fail their self-test. Steps have others, so a failure is only a warning."""
    refused = set()
    for way, load in QUICK_WAYS.items():
        if (reason := why_not_in_place(MetalBackend(on_metal), load)) is not None:
            log.warning("without %s, which is slower: %s", way.value, reason)
            refused.add(way)
    return frozenset(refused)
