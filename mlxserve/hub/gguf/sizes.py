"""Sizes of a GGUF file's tensors after repacking, and their quantisation."""

from __future__ import annotations

from collections import Counter
from math import prod

from mlxserve.hub.gguf.reader import Header

# Bits for each value: a scale and a bias of 16 bits for each 32.
_SCALES = 1.0
_BITS = {  # bits per value
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 4 + _SCALES),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 5 + _SCALES),
    **dict.fromkeys(("Q8_0", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS"), 8 + _SCALES),
    **dict.fromkeys(
        ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 8 + _SCALES
    ),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 2 + _SCALES),
    "NVFP4": 8 + _SCALES,
    "MXFP4": 4.25,
}


def size_in_memory(header: Header) -> int:
    """Bytes of all tensors in memory on Metal."""
    return sum(
        int(prod(tensor.shape) * _BITS.get(tensor.kind, 16) / 8)
        for tensor in header.tensors.values()
    )


def kinds(header: Header) -> dict[str, tuple[int, int]]:
    """Number of tensors and bytes in the file for each kind of block, largest first."""
    counts = Counter(tensor.kind for tensor in header.tensors.values())
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    return {kind: (counts[kind], size) for kind, size in sizes.most_common()}
