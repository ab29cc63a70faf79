"""Whole .metal files: names, constants, bindings."""

from pathlib import Path
from typing import TypedDict

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.emulator import LaunchError, Library, MetalSourceError, OutputBuffer

SOURCE = """
#include <metal_stdlib>
#include "weights.h"
using namespace metal;

constant bool twice [[function_constant(0)]];
constant int offset [[function_constant(1)]];
constant float factor [[function_constant(2)]];

struct Params { int count; float scale; int64_t strides[2]; };

template <typename T, int N>
[[kernel]] void weigh(
    const device T* x [[buffer(0)]],
    const constant Params& params [[buffer(1)]],
    const device T* bias [[buffer(2), function_constant(twice)]],
    device T* out [[buffer(3)]],
    threadgroup float* scratch [[threadgroup(0)]],
    uint i [[thread_position_in_grid]],
    uint l [[thread_index_in_threadgroup]]) {
  scratch[l] = float(x[i * params.strides[0]]) * params.scale * WEIGHT;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = scratch[l] + offset + factor * N;
  if (twice) sum = sum * 2 + float(bias[0]);
  out[i] = T(sum);
}
template [[host_name("weigh_half_4")]] [[kernel]] decltype(weigh<half, 4>) weigh<half, 4>;
template [[host_name("weigh_float_1")]] [[kernel]] void weigh<float, 1>(
    const device float* x [[buffer(0)]],
    const constant Params& params [[buffer(1)]],
    const device float* bias [[buffer(2), function_constant(twice)]],
    device float* out [[buffer(3)]],
    threadgroup float* scratch [[threadgroup(0)]],
    uint i [[thread_position_in_grid]],
    uint l [[thread_index_in_threadgroup]]);

kernel void copy(const device float* from, device float* to, uint2 at [[thread_position_in_grid]]) {
  to[at.x] = from[at.x];
}
"""


class DispatchSize(TypedDict):
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


PARAMS = np.dtype([("count", "i4"), ("scale", "f4"), ("strides", "i8", 2)])


@pytest.fixture
def includes(tmp_path: Path) -> Path:
    (tmp_path / "weights.h").write_text("#define WEIGHT 3\n")
    return tmp_path


@pytest.fixture
def library(includes: Path) -> Library:
    return Library(SOURCE, name="weigh.metal", include_dirs=[includes], check=True)


def params(scale: float, stride: int) -> NDArray[np.void]:
    return np.array((0, scale, (stride, 0)), PARAMS)


def test_a_host_name_constants_structs_and_threadgroup_memory(library: Library) -> None:
    constants: dict[int | str, float] = {0: True, "offset": 5, 2: 0.25}
    run = library.function("weigh_half_4", constants)
    x = mx.arange(32).astype(mx.float16)
    outputs = run(
        {0: x, 1: params(0.5, 2), 2: mx.array([100], mx.float16)},
        {3: OutputBuffer((16,), mx.float16)},
        grid=(16, 1, 1),
        threadgroup=(8, 1, 1),
        threadgroup_memory={0: 32},
    )
    assert outputs[3].tolist() == [(k * 3 + 5 + 1) * 2 + 100 for k in range(16)]
    assert run.statistics is not None
    assert run.statistics.threadgroup_bytes == 32


def test_constants_are_zero_and_their_parameters_absent_unless_given(library: Library) -> None:
    for name in ("weigh_float_1", "weigh<float, 1>"):
        outputs = library.function(name)(
            {0: mx.arange(4).astype(mx.float32), 1: params(1, 1)},
            {3: OutputBuffer((4,), mx.float32)},
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
            threadgroup_memory={0: 16},
        )
        assert outputs[3].tolist() == [0, 3, 6, 9]


def test_buffers_without_an_index_are_numbered_in_order(library: Library) -> None:
    run = library.function("copy")
    x = mx.arange(5).astype(mx.float32)
    size: DispatchSize = {"grid": (5, 1, 1), "threadgroup": (5, 1, 1)}
    assert run({0: x}, {1: OutputBuffer((5,), mx.float32)}, **size)[1].tolist() == x.tolist()
    target = mx.zeros((5,))
    assert run({0: x, 1: target}, {}, writable=[1], **size) == {}
    assert target.tolist() == x.tolist()


def test_a_changed_include_is_compiled_anew(includes: Path) -> None:
    def first_value() -> float:
        library = Library(SOURCE, include_dirs=[includes])
        run = library.function("weigh_float_1")
        outputs = run(
            {0: mx.array([1.0]), 1: params(1, 1)},
            {3: OutputBuffer((1,), mx.float32)},
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            threadgroup_memory={0: 16},
        )
        return float(np.array(outputs[3])[0])

    assert first_value() == 3
    (includes / "weights.h").write_text("#define WEIGHT 7\n")
    assert first_value() == 7


def test_wrong_requests_are_refused_with_what_to_change(library: Library) -> None:
    with pytest.raises(MetalSourceError, match="no kernel 'weight'; the source has: weigh_float_1"):
        library.function("weight")
    run = library.function("copy")
    size: DispatchSize = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
    x = mx.zeros((4,))
    with pytest.raises(LaunchError, match=r"copy: buffer 1 \('to'\) is not bound"):
        run({0: x}, {}, **size)
    with pytest.raises(LaunchError, match=r"buffers \[0\] are both inputs and outputs"):
        run({0: x}, {0: OutputBuffer((4,), mx.float32)}, **size)
    with pytest.raises(LaunchError, match=r"writable buffers \[7\] are not inputs"):
        run({0: x, 1: x}, {}, writable=[7], **size)
    with pytest.raises(LaunchError, match=r"buffer index 31 is not in 0\.\.30"):
        run({0: x, 1: x, 31: x}, {}, **size)
    with pytest.raises(LaunchError, match=r"threadgroup arguments pass the limit of 32768 bytes"):
        run({0: x, 1: x}, {}, threadgroup_memory={0: 40000}, **size)


def test_a_parameter_that_cannot_be_filled_is_refused() -> None:
    source = "kernel void k(device float* out, uint i [[thread_position_in_girdle]]) {}"
    with pytest.raises(MetalSourceError, match="kernel parameter 'i' has no attribute Metal knows"):
        Library(source).function("k")


def test_a_missing_include_is_named() -> None:
    with pytest.raises(MetalSourceError, match=r"nowhere\.metal:2.*'absent\.h' file not found"):
        Library('\n#include "absent.h"', name="nowhere.metal").function("k")


MEMBERS = """
struct Cell {
  float v;
  float get() const device { return v; }
  float get() const thread { return -v; }
};
kernel void k(const device Cell* cells, device float* out, uint i [[thread_position_in_grid]]) {
  out[i] = cells[i].get();
}
"""


def test_the_second_front_end_tells_members_apart_by_address_space() -> None:
    run = Library(MEMBERS, dialect="opencl").function("k")
    size: DispatchSize = {"grid": (2, 1, 1), "threadgroup": (2, 1, 1)}
    outputs = run({0: mx.array([1.0, 2.0])}, {1: OutputBuffer((2,), mx.float32)}, **size)
    assert outputs[1].tolist() == [1.0, 2.0]
    with pytest.raises(MetalSourceError):
        Library(MEMBERS).function("k")
