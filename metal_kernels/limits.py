"""Shapes and dtypes that the kernels support, and the backends' names. Standard library only."""

from __future__ import annotations

BACKENDS = ("auto", "metal", "cpu", "reference")
PAGE_SIZES = (16, 32, 64)
# Of the Metal kernels; the other backends take any.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
