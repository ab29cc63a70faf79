"""MLX's own kernels, from the headers of its wheel, and what their tests share."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.emulator import Library, LibraryFunction
from tests.emulator.kernel import mlx_include_folder

FOLDER = "mlx/backend/metal/kernels"
DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}

Floats = NDArray[np.float64]


def load(
    headers: str,
    kernel: str,
    constants: dict[int, bool | int] | None = None,
    *,
    check: bool = True,
    strict: bool = True,
) -> LibraryFunction:
    """A kernel of these headers, whose names a space separates."""
    names = ["utils.h", *headers.split()]
    library = Library(
        "".join(f'#include "{FOLDER}/{name}"\n' for name in names),
        include_dirs=[mlx_include_folder()],
        check=check,
        strict=strict,
    )
    return library.function(kernel, constants or {})


def random(dtype: mx.Dtype, *shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def exact(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def scalar(value: float, dtype: type) -> NDArray[np.generic]:
    return np.array(value, dtype)


def assert_close(out: mx.array, expected: Floats) -> None:
    assert np.abs(exact(out).reshape(expected.shape) - expected).max() < TOLERANCE[out.dtype]


def strides(array: mx.array) -> list[int]:
    view = np.array(array.astype(mx.float32))
    return [stride // view.itemsize for stride in view.strides]
