"""Parts of the Metal language and library that MLX's own kernels use."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from tests.emulator import KernelFault, MetalSourceError, metal_kernel


@dataclass(frozen=True)
class Example:
    """A body that writes `out`, given x = 1, 2, ..., 32 and, in `constant` memory, few = 5, 7."""

    name: str
    body: str
    out: list[float]
    header: str = ""


STRUCT = "struct alignas(16) Four { float v[4]; };\n"
EXAMPLES = [
    Example(
        "whether a type has a sign",
        "out[0] = metal::is_signed_v<int>; out[1] = is_signed_v<uint>; out[2] = is_signed_v<half>;",
        [1, 0, 1],
    ),
    Example(
        "whether a type has none", "out[0] = is_unsigned_v<uchar> + is_unsigned_v<float>;", [1]
    ),
    Example(
        "an array returned by value",
        "metal::array<float, 2> a = both(x[0], x[1]); a[1] += 1; out[0] = a[0] + a.size(); out[1] = a[1];",
        [3, 3],
        "inline metal::array<float, 2> both(float a, float b) { return {a, b}; }\n",
    ),
    Example(
        "a uniform number",
        "const uniform<int> n = make_uniform(int(x[3])) / make_uniform(2); out[0] = n;",
        [2],
    ),
    Example(
        "the size of a vector of bool", "out[0] = sizeof(bool4); out[1] = sizeof(bool3);", [4, 4]
    ),
    Example(
        "a vector of bool seen as bytes",
        "union { bool4 b; uint i; } u; u.b = {true, true, false, true}; u.b[0] = false; out[0] = u.i >> 8;",
        [1 + (1 << 16)],
    ),
    Example(
        "a vector of bool from a comparison",
        "bool4 less = float4(1, 2, 3, 4) < float4(2); out[0] = less.x; out[1] = less[1]; "
        "out[2] = any(less); out[3] = all(less);",
        [1, 0, 1, 0],
    ),
    Example(
        "a choice by a vector of bool",
        "float2 v = select(float2(1), float2(2), bool2(true, false)); out[0] = v.x; out[1] = v.y;",
        [2, 1],
    ),
    Example(
        "a struct read from device memory",
        "Four f; f = *((const device Four*)(x + 4)); out[0] = f.v[3];",
        [8],
        STRUCT,
    ),
    Example(
        "a struct copied into threadgroup memory",
        "threadgroup float t[4]; *((threadgroup Four*)(t)) = *((const device Four*)(x + 8)); out[0] = t[1];",
        [10],
        STRUCT,
    ),
    Example(
        "a vector copied into threadgroup memory",
        "threadgroup float t[4]; *((threadgroup float4*)(t)) = *((const device float4*)(x)); out[0] = t[2];",
        [3],
    ),
    Example(
        "an argument for a constant reference",
        "out[0] = second(few);",
        [7],
        "inline float element(constant float& f) { return f; }\n"
        "inline float second(const constant float* f) { return element(f[1]); }\n",
    ),
    Example(
        "braces as a vector argument",
        "out[0] = last({uint(x[2]), 2u, 9u}, 1);",
        [10],
        "inline uint last(uint3 v, uint more) { return v.z + more; }\n",
    ),
    Example("braces in a vector's constructor", "out[0] = float2({x[0], x[1]}).y;", [2]),
    Example(
        "braces around vectors",
        "out[0] = last({float2(1, 2), float2(3, 4)});",
        [4],
        "inline float last(float4 v) { return v.w; }\n",
    ),
    Example("a vector named with its namespace", "out[0] = metal::vec<float, 2>(3, 4).y;", [4]),
    Example(
        "a fence between atomics",
        "threadgroup atomic<int> n; atomic_store_explicit(&n, 3, memory_order_relaxed);\n"
        "atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst, thread_scope_threadgroup);\n"
        "out[0] = atomic_load_explicit(&n, memory_order_relaxed);",
        [3],
    ),
    Example(
        "a logger",
        "report.log_debug(few); out[0] = 1;",
        [1],
        'constant metal::os_log report("a", "b");\n',
    ),
]


def run(body: str, header: str, size: int, threads: int = 1, *, strict: bool = True) -> mx.array:
    kernel = metal_kernel("k", ["x", "few"], ["out"], body, header, check=True, strict=strict)
    x, few = mx.arange(1, 33, dtype=mx.float32), mx.array([5.0, 7.0])
    return kernel(
        inputs=[x, few],
        output_shapes=[(size,)],
        output_dtypes=[mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_it_means_what_metal_says(example: Example) -> None:
    assert run(example.body, example.header, len(example.out)).tolist() == example.out


def test_a_struct_copied_past_the_end_of_a_buffer_is_a_fault() -> None:
    body = "Four f; f = *((const device Four*)(x + 32)); out[0] = f.v[0];"
    with pytest.raises(KernelFault, match="'x'"):
        run(body, STRUCT, 1)


def test_a_fence_is_no_barrier() -> None:
    body = (
        "threadgroup int n; if (thread_index_in_threadgroup == 0) n = 1;\n"
        "atomic_thread_fence(mem_flags::mem_threadgroup, memory_order_seq_cst);\n"
        "if (thread_index_in_threadgroup == 33) out[0] = n;"
    )
    with pytest.raises(KernelFault, match="'n'"):
        run(body, "", 1, threads=64)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("constant float* p = few; p[0] = 1; out[0] = 1;", "not assignable"),
        (
            "threadgroup float t[4]; *((threadgroup Two*)(t)) = *((const device Four*)(x));",
            "two types",
        ),
        ("out[0] = last({x[0], x[1], x[2]});", "no matching function"),
        ("\n#pragma clang loop unroll(full)\nout[0] = 1;", "expected a for, while, or do-while"),
    ],
    ids=[
        "a store into constant memory",
        "a copy of another struct",
        "braces with a part too many",
        "an unrolled statement",
    ],
)
def test_what_metal_refuses_is_refused(body: str, message: str) -> None:
    header = (
        f"{STRUCT}struct Two {{ float v[2]; }};\ninline float last(float2 v) {{ return v.y; }}\n"
    )
    with pytest.raises(MetalSourceError, match=message):
        run(body, header, 1)
