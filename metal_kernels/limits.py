"""What the kernels are written for, and the names of the backends. Needs the standard library alone."""

from __future__ import annotations

BACKENDS = ("auto", "metal", "cpu", "reference")
PAGE_SIZES = (16, 32, 64)
# Of the Metal kernels; the other backends take any.
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
