"""Kernels that are wrong on purpose: check mode must say what is wrong, and where.

Each text marks its faulty line with `// here`; without a mark the fault is outside the body (a
frame that is too large fails before the first statement). The buffers are a: 256 floats, s: 2 floats (so few
that it arrives as `constant`), h: 256 halves, i: 256 ints, and the output `out`: 64 floats.
"""

from dataclasses import dataclass

import mlx.core as mx
import pytest

from tests.emulator import (
    FaultKind,
    KernelFault,
    LaunchError,
    MetalSourceError,
    SourceLine,
    metal_kernel,
)

MARK = "// here"
INDEX = "uint x = thread_position_in_grid.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@dataclass(frozen=True)
class Refused:
    """A text that is not Metal."""

    name: str
    source: str
    message: str
    header: str = ""


@dataclass(frozen=True)
class Broken:
    """A text that is Metal and breaks a rule while it runs."""

    name: str
    source: str
    kind: FaultKind
    buffer: str | None = None


REFUSED = [
    Refused(
        "a device pointer assigned to a thread pointer",
        "const float* p = a; // here\nout[0] = p[0];",
        "needs an address space",
    ),
    Refused(
        "a device pointer passed as a thread pointer",
        "out[0] = first(a); // here",
        "no matching function for call to 'first'",
        "inline float first(const thread float* p) { return p[0]; }\n",
    ),
    Refused(
        "a threadgroup pointer assigned to a device pointer",
        "threadgroup float w[4];\nw[0] = 1;\ndevice float* p = w; // here\nout[0] = p[0];",
        "cannot initialize a variable of type '__global float *'",
    ),
    Refused("const dropped", "device float* p = a; // here\np[0] = 1;", "cannot initialize"),
    Refused(
        "a small input named as a device pointer",
        "const device float* p = s; // here\nout[0] = p[0];",
        "with an lvalue of type 'const __constant float *'",
    ),
    Refused(
        "a thread reference bound to a device object",
        "set(out[0]); // here",
        "no matching function for call to 'set'",
        "inline void set(thread float& x) { x = 1; }\n",
    ),
    Refused(
        "a helper's pointer without an address space",
        "out[0] = 1;",
        "needs an address space",
        "inline float f(const float* p) { return p[0]; } // here\n",
    ),
    Refused("double", "double d = 1.0; // here\nout[0] = d;", "Metal has no double"),
    Refused("the standard library", "out[0] = std::max(1.0f, 2.0f); // here", "standard library"),
    Refused("a C header", "out[0] = 1;", "'cmath' file not found", "#include <cmath> // here\n"),
    Refused("float to bfloat", "bfloat b = a[0]; // here\nout[0] = float(b);", "to bfloat"),
    Refused(
        "bfloat to half",
        "bfloat b = bfloat(a[0]);\nhalf z = b; // here\nout[0] = z;",
        "half",
    ),
    Refused("max of int and uint", f"{INDEX}out[0] = max(i[0], x); // here", "ambiguous"),
    Refused(
        "a variable length array",
        "int n = i[3];\nfloat t[n]; // here\nt[0] = 1;\nout[0] = t[0];",
        "variable length array",
    ),
    Refused(
        "a threadgroup variable in a helper",
        "out[0] = g(a[0]);",
        "outside a kernel function",
        "inline float g(float x) {\n  threadgroup float t[4]; // here\n  return x + t[0];\n}\n",
    ),
    Refused(
        "a threadgroup initialiser",
        "threadgroup float t[2] = {0, 0}; // here\nout[0] = t[0];",
        "initialiser",
    ),
    Refused("a function of C", "out[0] = expf(a[0]); // here", "expf"),
    Refused(
        "half4 to float4",
        "float4 v = *(const device half4*)h; // here\nout[0] = v.x;",
        "half4",
    ),
    Refused(
        "a virtual function",
        "out[0] = 1;",
        "no virtual functions",
        "struct S {\n  virtual float f() { return 1; } // here\n};\n",
    ),
    Refused("a static local", "static int n = 0; // here\nn++;\nout[0] = n;", "static"),
    Refused(
        "a mutable global", "count += 1;\nout[0] = count;", "count", "int count = 0; // here\n"
    ),
    Refused(
        "a function pointer",
        "float (*p)(float) = sq; // here\nout[0] = p(a[0]);",
        "function",
        "inline float sq(float x) { return x * x; }\n",
    ),
    Refused(
        "recursion",
        "out[0] = fac(i[3]);",
        "'fac' calls itself",
        "inline int fac(int n) {\n  return n < 2 ? 1 : n * fac(n - 1); // here\n}\n",
    ),
    Refused("new", "thread int* p = new int; // here\nout[0] = *p;", "Metal has no new"),
    Refused("an exception", "throw 1; // here", "no exceptions"),
    Refused("goto", "goto end; // here\nend: out[0] = 1;", "no goto"),
    Refused("a vector with too few parts", "out[0] = float4(1, 2, 3).x; // here", "components"),
    Refused(
        "a simd sum of bfloat vectors",
        "out[0] = float(simd_xor(a[0])); // here",
        "simd_xor",
    ),
]

BROKEN = [
    Broken(
        "a read past the end",
        f"{INDEX}out[x] = a[256 + x]; // here",
        FaultKind.DEVICE_BOUNDS,
        "a",
    ),
    Broken("a read far past the end", "out[0] = a[5000000]; // here", FaultKind.DEVICE_BOUNDS, "a"),
    Broken("a read before the start", "out[0] = a[-1]; // here", FaultKind.DEVICE_BOUNDS, "a"),
    Broken("a read past a small input", "out[0] = s[2]; // here", FaultKind.DEVICE_BOUNDS, "s"),
    Broken(
        "a write past the end", f"{INDEX}out[64 + x] = 1; // here", FaultKind.DEVICE_BOUNDS, "out"
    ),
    Broken(
        "a vector half past the end",
        "out[0] = (*(const device packed_t*)(a + 254)).v[2]; // here",
        FaultKind.DEVICE_BOUNDS,
        "a",
    ),
    Broken(
        "a threadgroup index past the end",
        f"{INDEX}threadgroup float t[32];\n"
        f"for (uint k = x; k < 33; k += 64) t[k + x] = 1; // here\n{BARRIER}out[x] = t[0];",
        FaultKind.THREADGROUP_BOUNDS,
        "t",
    ),
    Broken(
        "a private array index past the end",
        f"{INDEX}float t[4];\nfor (int k = 0; k < 4; k++) t[k] = k;\nout[x] = t[x]; // here",
        FaultKind.ARRAY_BOUNDS,
    ),
    Broken(
        "uninitialised threadgroup memory",
        f"{INDEX}threadgroup float t[64];\nif (x < 32) t[x] = 1;\n{BARRIER}"
        "out[x] = t[63 - x]; // here",
        FaultKind.THREADGROUP_UNINITIALISED,
        "t",
    ),
    Broken(
        "a missing barrier after a write",
        f"{INDEX}threadgroup float t[64];\nt[x] = 1;\nout[x] = t[x ^ 32]; // here",
        FaultKind.THREADGROUP_UNINITIALISED,
        "t",
    ),
    Broken(
        "a missing barrier before a second write",
        f"{INDEX}threadgroup float t[64];\nt[x] = 1;\n{BARRIER}float v = t[x ^ 32];\n"
        "t[x] = v + 1; // here\nout[x] = v;",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "a missing simdgroup barrier",
        f"{INDEX}threadgroup float t[64];\nt[x] = 0;\n{BARRIER}t[x] = x;\n"
        "float v = t[x & ~1u]; // here\nout[x] = v;",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "a simdgroup barrier between simdgroups",
        f"{INDEX}threadgroup float t[64];\nt[x] = 0;\n{BARRIER}t[x] = x; // here\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[x] = t[x & 31];",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "a barrier of no memory used for data",
        f"{INDEX}threadgroup float t[64];\nt[x] = 1;\n"
        "threadgroup_barrier(mem_flags::mem_none);\nout[x] = t[x ^ 1]; // here",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "a barrier of device memory used for threadgroup data",
        f"{INDEX}threadgroup float t[64];\nt[x] = 1;\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[x] = t[x ^ 1]; // here",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "two threads write one threadgroup element",
        f"{INDEX}threadgroup float t[64];\nt[x / 2] = x; // here\n{BARRIER}out[x] = t[0];",
        FaultKind.THREADGROUP_RACE,
        "t",
    ),
    Broken(
        "a barrier in a branch of one simdgroup",
        f"{INDEX}if (x < 32)\n  threadgroup_barrier(mem_flags::mem_threadgroup); // here\nout[x] = 1;",
        FaultKind.DIVERGENCE,
    ),
    Broken(
        "a return before a barrier",
        f"{INDEX}if (x == 5) return;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); // here\nout[x] = 1;",
        FaultKind.DIVERGENCE,
    ),
    Broken(
        "two different barriers",
        f"{INDEX}if (x < 32) {{\n  out[0] = 2;\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n} else {\n"
        "  threadgroup_barrier(mem_flags::mem_device); // here\n  out[40] = 3;\n}",
        FaultKind.DIVERGENCE,
    ),
    Broken(
        "a barrier in a loop of uneven length",
        f"{INDEX}for (uint k = 0; k < x % 3; k++)\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup); // here\nout[x] = 1;",
        FaultKind.DIVERGENCE,
    ),
    Broken(
        "a simd sum in a branch",
        f"{INDEX}float v = 1;\nif (thread_index_in_simdgroup < 7) v = simd_sum(v);\n"
        "else v = simd_max(v * 2); // here\nout[x] = v;",
        FaultKind.DIVERGENCE,
    ),
    Broken(
        "a broadcast from a lane that has returned",
        f"{INDEX}if (thread_index_in_simdgroup == 3) return;\n"
        "out[x] = simd_broadcast(1.0f, 3); // here",
        FaultKind.MISUSE,
    ),
    Broken(
        "a shuffle from lane 32",
        f"{INDEX}out[x] = simd_shuffle(1.0f, 32); // here",
        FaultKind.MISUSE,
    ),
    Broken(
        "a failed assertion",
        f"{INDEX}assert(i[x] < 40); // here\nout[x] = 1;",
        FaultKind.MISUSE,
    ),
    Broken(
        "a write to an input",
        f"{INDEX}out[x] = 1;\n((device float*)a)[x] = 1; // here",
        FaultKind.READ_ONLY,
        "a",
    ),
    Broken(
        "two threads write one output",
        f"{INDEX}out[x / 2] = x; // here\nout[32 + x / 2] = x; ",
        FaultKind.DEVICE_RACE,
        "out",
    ),
    Broken(
        "an output read by a neighbour",
        f"{INDEX}out[x] = x;\nfloat v = out[x ^ 1]; // here\nif (v < 0) out[x] = v;",
        FaultKind.UNWRITTEN_READ,
        "out",
    ),
    Broken(
        "an output read before it is written",
        f"{INDEX}out[x] += 1; // here",
        FaultKind.UNWRITTEN_READ,
        "out",
    ),
    Broken(
        "an output left unwritten",
        f"{INDEX}if (x != 9) out[x] = 1;",
        FaultKind.UNWRITTEN_OUTPUT,
        "out",
    ),
    Broken(
        "a misaligned vector load",
        f"{INDEX}out[x] = (*(const device float4*)(a + 1)).x; // here",
        FaultKind.ALIGNMENT,
        "a",
    ),
    Broken("a shift by too much", f"{INDEX}out[x] = 1 << i[40]; // here", FaultKind.SHIFT),
    Broken("a division by zero", f"{INDEX}out[x] = 7 / i[0]; // here", FaultKind.DIVISION),
    Broken(
        "a matrix load whose pointer differs by lane",
        f"{INDEX}threadgroup float t[128];\nt[x] = 1;\nt[64 + x] = 1;\n{BARRIER}"
        "simdgroup_matrix<float, 8, 8> m;\n"
        "simdgroup_load(m, t + thread_index_in_simdgroup % 2, 8); // here\n"
        "if (x < 32) simdgroup_store(m, out, 8);",
        FaultKind.MISUSE,
    ),
    Broken(
        "more than 32 KB of threadgroup memory",
        f"{INDEX}threadgroup float t[9000]; // here\nt[x] = 1;\nout[x] = t[x];",
        FaultKind.THREADGROUP_LIMIT,
        "t",
    ),
    Broken(
        "more private memory than a stack",
        f"{INDEX}float t[100000];\nfor (int k = 0; k < 100000; k++) t[k] = a[k % 256];\n"
        "out[x] = t[i[x]];",
        FaultKind.STACK,
    ),
]

HEADER = "struct packed_t { float v[4]; };\n"


def line_of_mark(text: str) -> int | None:
    lines = text.splitlines()
    return next((k for k, line in enumerate(lines, 1) if MARK in line), None)


def run(
    source: str, header: str, *, check: bool, threads: int = 64, partly_written: str = ""
) -> mx.array:
    kernel = metal_kernel(
        "planted",
        ["a", "s", "h", "i"],
        ["out"],
        source,
        header,
        check=check,
        partly_written=partly_written.split(),
    )
    a = mx.arange(256).astype(mx.float32)
    return kernel(
        inputs=[a, mx.array([2.0, 3.0]), a.astype(mx.float16), a.astype(mx.int32)],
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )[0]


def test_there_are_at_least_45_planted_faults() -> None:
    assert len(REFUSED) + len(BROKEN) >= 45
    assert len({case.name for case in REFUSED} | {case.name for case in BROKEN}) == len(
        REFUSED
    ) + len(BROKEN)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_text_that_is_not_metal_is_refused(case: Refused) -> None:
    in_header = line_of_mark(case.header)
    place = (
        f"planted.header:{in_header}" if in_header else f"planted.metal:{line_of_mark(case.source)}"
    )
    with pytest.raises(MetalSourceError) as caught:
        run(case.source, case.header, check=True)
    assert case.message in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_rule_is_a_fault_at_its_line(case: Broken) -> None:
    with pytest.raises(KernelFault) as caught:
        run(case.source, HEADER, check=True)
    line = line_of_mark(case.source)
    place = None if line is None else SourceLine("planted.metal", line)
    found = [f for f in caught.value.faults if f.kind is case.kind and place in (None, f.place)]
    assert len(found) == 1, caught.value
    assert found[0].buffer == case.buffer
    assert found[0].message in str(caught.value)
    # No single thread leaves an output unwritten.
    assert (found[0].thread is None) == (case.kind is FaultKind.UNWRITTEN_OUTPUT)


def test_an_output_that_is_partly_written_keeps_the_rule_for_reads() -> None:
    assert run(f"{INDEX}if (x != 9) out[x] = 1;", "", check=True, partly_written="out")[0] == 1
    with pytest.raises(KernelFault) as caught:
        run(
            f"{INDEX}if (x != 9) out[x] = 1; else out[x] += 1;",
            "",
            check=True,
            partly_written="out",
        )
    assert [fault.kind for fault in caught.value.faults] == [FaultKind.UNWRITTEN_READ]


def test_a_threadgroup_of_more_than_1024_threads_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"2048 threads, the limit is 1024"):
        run("out[0] = 1;", "", check=True, threads=2048)


def test_fast_mode_still_catches_a_read_far_outside() -> None:
    with pytest.raises(KernelFault) as caught:
        run(f"{INDEX}out[x] = a[5000000 + x]; // here", "", check=False)
    fault = caught.value.faults[0]
    assert fault.kind is FaultKind.MEMORY
    assert str(fault.place) == "planted.metal:2"
    assert fault.buffer == "a"
    assert fault.offset == 4 * 5000000


def test_a_sound_kernel_passes_every_check() -> None:
    out = run(
        f"{INDEX}threadgroup float t[64];\nt[x] = a[x];\n{BARRIER}out[x] = t[63 - x] * s[0];",
        "",
        check=True,
    )
    assert out.tolist() == [2.0 * (63 - k) for k in range(64)]
