"""`metal_kernel` means what `mx.fast.metal_kernel` means."""

from typing import Any, TypedDict

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import KernelFault, LaunchError, metal_kernel

INDEX = "uint i = thread_position_in_grid.x;\n"
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


class DispatchSize(TypedDict):
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def line(size: int, threads: int = 32) -> DispatchSize:
    return {"grid": (size, 1, 1), "threadgroup": (threads, 1, 1)}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_template_takes_types_and_numbers(dtype: mx.Dtype) -> None:
    kernel = metal_kernel(
        "scaled", ["x"], ["out"], f"{INDEX}out[i] = N > 2 && F ? T(x[i] * N) : T(0);", check=True
    )
    x = mx.arange(50).astype(dtype)
    (out,) = kernel(
        inputs=[x],
        template=[("T", dtype), ("N", 3), ("F", True)],
        output_shapes=[(5, 10)],
        output_dtypes=[dtype],
        **line(50),
    )
    assert out.dtype == dtype
    assert out.shape == (5, 10)
    assert out.tolist() == (x * 3).reshape(5, 10).tolist()


def test_a_body_may_name_shape_strides_and_dimensions_of_an_input() -> None:
    kernel = metal_kernel(
        "meta",
        ["x", "n"],
        ["out"],
        f"{INDEX}if (i < 2) out[i] = x_shape[i]; else if (i < 4) out[i] = x_strides[i - 2];\n"
        "else out[i] = x_ndim * 100 + n;",
        ensure_row_contiguous=False,
        check=True,
    )
    x = mx.zeros((4, 6), mx.float16).T
    (out,) = kernel(inputs=[x, 7], output_shapes=[(5,)], output_dtypes=[mx.int32], **line(5))
    assert out.tolist() == [6, 4, 1, 6, 207]


def test_a_strided_input_is_made_contiguous_unless_asked_otherwise() -> None:
    x = mx.arange(24).reshape(4, 6).T
    source = f"{INDEX}out[i] = x[i];"
    values = [
        metal_kernel("order", ["x"], ["out"], source, ensure_row_contiguous=contiguous)(
            inputs=[x], output_shapes=[(24,)], output_dtypes=[mx.int32], **line(24)
        )[0].tolist()
        for contiguous in (True, False)
    ]
    assert values == [x.flatten().tolist(), list(range(24))]


def test_several_outputs_of_every_kind_of_type() -> None:
    dtypes = [mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16]
    names = [f"o{k}" for k in range(len(dtypes))]
    source = INDEX + "\n".join(f"{name}[i] = i;" for name in names)
    outputs = metal_kernel("kinds", ["x"], names, source)(
        inputs=[1.0], output_shapes=[(3,)] * len(dtypes), output_dtypes=dtypes, **line(3)
    )
    for output, dtype in zip(outputs, dtypes, strict=True):
        assert output.dtype == dtype
        assert output.tolist() == mx.arange(3).astype(dtype).tolist()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32], ids=str)
def test_init_value_fills_what_the_kernel_leaves(dtype: mx.Dtype) -> None:
    kernel = metal_kernel("partly", ["x"], ["out"], f"{INDEX}if (i == 1) out[i] = x;", check=True)
    (out,) = kernel(
        inputs=[mx.array(5, dtype)],
        output_shapes=[(4,)],
        output_dtypes=[dtype],
        init_value=-2,
        **line(4),
    )
    assert out.tolist() == [-2, 5, -2, -2]


def test_atomic_outputs_add_up() -> None:
    kernel = metal_kernel(
        "count",
        ["x"],
        ["out"],
        f"{INDEX}atomic_fetch_add_explicit(&out[x[i] % 3], 1, memory_order_relaxed);",
        atomic_outputs=True,
        check=True,
    )
    (out,) = kernel(
        inputs=[mx.arange(100)],
        output_shapes=[(3,)],
        output_dtypes=[mx.int32],
        init_value=0,
        **line(100),
    )
    assert out.tolist() == [34, 33, 33]


def test_an_atomic_update_of_nothing_is_a_fault() -> None:
    kernel = metal_kernel(
        "count",
        ["x"],
        ["out"],
        f"{INDEX}atomic_fetch_add_explicit(&out[x[i] % 3], 1, memory_order_relaxed);",
        atomic_outputs=True,
        check=True,
    )
    with pytest.raises(KernelFault, match="read of the output 'out' before anything was written"):
        kernel(inputs=[mx.arange(100)], output_shapes=[(3,)], output_dtypes=[mx.int32], **line(100))


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_writable_input_is_written_in_place(dtype: mx.Dtype, check: bool) -> None:
    kernel = metal_kernel(
        "write",
        ["rows", "slots", "pool"],
        ["done"],
        "uint i = thread_position_in_grid.x, n = thread_position_in_grid.y;\n"
        "((device T*)pool)[slots[n] * D + i] = rows[n * D + i];\n"
        "if (i == 0) done[n] = 1;",
        writable_inputs=["pool"],
        check=check,
    )
    pool = mx.random.normal((10, 16), key=mx.random.key(1)).astype(dtype)
    rows = mx.random.normal((3, 16), key=mx.random.key(2)).astype(dtype)
    expected = np.array(pool.astype(mx.float32))
    expected[[7, 0, 4]] = np.array(rows.astype(mx.float32))
    (done,) = kernel(
        inputs=[rows, mx.array([7, 0, 4, 0, 0, 0, 0, 0]), pool],
        template=[("T", dtype), ("D", 16)],
        output_shapes=[(3,)],
        output_dtypes=[mx.int32],
        grid=(16, 3, 1),
        threadgroup=(16, 1, 1),
    )
    assert done.tolist() == [1, 1, 1]
    assert np.array_equal(np.array(pool.astype(mx.float32)), expected)


def test_a_fault_leaves_a_writable_input_as_it_was() -> None:
    kernel = metal_kernel(
        "spoil",
        ["pool"],
        ["done"],
        f"{INDEX}((device float*)pool)[i * 9] = 1; done[i] = 1;",
        writable_inputs=["pool"],
        check=True,
    )
    pool = mx.zeros((16,))
    with pytest.raises(KernelFault, match="'pool'"):
        kernel(inputs=[pool], output_shapes=[(4,)], output_dtypes=[mx.int32], **line(4))
    assert pool.tolist() == [0.0] * 16


def test_a_strided_writable_input_is_refused() -> None:
    kernel = metal_kernel("write", ["pool"], ["done"], "", writable_inputs=["pool"])
    with pytest.raises(LaunchError, match="'pool' is written in place but is not row-contiguous"):
        kernel(
            inputs=[mx.zeros((8, 8)).T], output_shapes=[(1,)], output_dtypes=[mx.int32], **line(1)
        )


def test_threads_are_numbered_as_on_a_gpu_also_at_the_edge_of_the_grid() -> None:
    kernel = metal_kernel(
        "places",
        ["x"],
        ["out"],
        "uint3 p = thread_position_in_grid, g = threads_per_grid;\n"
        "uint at = (p.z * g.y + p.y) * g.x + p.x;\n"
        "out[at * 5] = thread_index_in_threadgroup;\n"
        "out[at * 5 + 1] = threads_per_threadgroup.x * 10 + dispatch_threads_per_threadgroup.x;\n"
        "out[at * 5 + 2] = threadgroup_position_in_grid.x * 10 + threadgroup_position_in_grid.y;\n"
        "out[at * 5 + 3] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;\n"
        "out[at * 5 + 4] = threadgroups_per_grid.x * 10 + simdgroups_per_threadgroup;",
        check=True,
    )
    (out,) = kernel(
        inputs=[0.0],
        output_shapes=[(2, 3, 10, 5)],
        output_dtypes=[mx.uint32],
        grid=(10, 3, 2),
        threadgroup=(8, 2, 2),
    )
    places = np.array(out)
    assert places[1, 1, 7].tolist() == [31, 88, 0, 31, 21]
    assert places[0, 2, 9].tolist() == [1, 28, 11, 1, 21]


def test_a_threadgroup_never_exceeds_the_grid() -> None:
    source = f"{INDEX}out[i] = threads_per_threadgroup.x;"
    (out,) = metal_kernel("clipped", ["x"], ["out"], source)(
        inputs=[0.0], output_shapes=[(5,)], output_dtypes=[mx.int32], **line(5, threads=4096)
    )
    assert out.tolist() == [5] * 5


def test_workers_share_the_threadgroups_and_change_nothing() -> None:
    source = (
        f"threadgroup float t[64];\n{INDEX}uint k = i % 64;\nt[k] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = simd_sum(t[63 - k]);"
    )
    x = mx.random.normal((6400,), key=mx.random.key(3))
    one, three = (
        metal_kernel("shared", ["x"], ["out"], source, workers=workers)(
            inputs=[x], output_shapes=[(6400,)], output_dtypes=[mx.float32], **line(6400, 64)
        )[0]
        for workers in (1, 3)
    )
    assert mx.array_equal(one, three)


def test_statistics_count_the_last_call() -> None:
    source = (
        f"threadgroup float t[100];\n{INDEX}t[i % 64] = simd_sum(1.0f);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = t[i % 64];"
    )
    kernel = metal_kernel("counted", ["x"], ["out"], source)
    assert kernel.statistics is None
    kernel(inputs=[0.0], output_shapes=[(128,)], output_dtypes=[mx.float32], **line(128, 64))
    assert kernel.statistics is not None
    assert kernel.statistics.num_threads == 128
    assert kernel.statistics.num_barriers == 128
    assert kernel.statistics.num_simd_operations == 128
    assert kernel.statistics.threadgroup_bytes == 400


def test_a_launch_remembers_nothing_of_the_ones_before() -> None:
    source = (
        f"threadgroup float t[N];\n{INDEX}t[i] = i;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = t[N - 1 - i];"
    )

    def run(size: int, check: bool) -> None:
        kernel = metal_kernel("forgetful", ["x"], ["out"], source, check=check)
        (out,) = kernel(
            inputs=[0.0],
            template=[("N", size)],
            output_shapes=[(size,)],
            output_dtypes=[mx.float32],
            **line(size, size),
        )
        assert out.tolist() == list(range(size))[::-1]

    run(64, check=True)
    run(8, check=False)
    run(64, check=True)


def test_wrong_arguments_are_refused_with_what_to_change() -> None:
    kernel = metal_kernel("refusing", ["x"], ["out"], "out[0] = x;")
    good: dict[str, Any] = {
        "inputs": [1.0],
        "output_shapes": [(1,)],
        "output_dtypes": [mx.float32],
        **line(1),
    }
    with pytest.raises(LaunchError, match=r"inputs has 2 entries, the kernel has \['x'\]"):
        kernel(**{**good, "inputs": [1.0, 2.0]})
    with pytest.raises(LaunchError, match=r"output_shapes has 0 entries"):
        kernel(**{**good, "output_shapes": []})
    with pytest.raises(LaunchError, match=r"grid=\(0, 1, 1\): three positive numbers"):
        kernel(**{**good, "grid": (0, 1, 1)})
    with pytest.raises(LaunchError, match=r"threadgroup=\(1, 1\)"):
        kernel(**{**good, "threadgroup": (1, 1)})
    with pytest.raises(LaunchError, match=r"writable inputs \['y'\] are not inputs"):
        metal_kernel("refusing", ["x"], ["out"], "", writable_inputs=["y"])
    with pytest.raises(LaunchError, match=r"compile_options takes math_mode"):
        metal_kernel("refusing", ["x"], ["out"], "", compile_options={"math_mode": "sloppy"})
