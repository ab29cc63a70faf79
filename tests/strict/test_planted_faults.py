"""Faults planted into MLX's text of a kernel: each is refused, for the reason it is a fault.

A fault is put at the start of the body or before the kernel, and names only the buffers of its
signature, so that kernels may be rewritten without touching this table.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from tests.strict.check import check
from tests.strict.texts import KernelText, some_texts

pytestmark = pytest.mark.instruments

END_OF_SIGNATURE = ") {\n"


@dataclass(frozen=True)
class Fault:
    """`because` is part of a message; the text is paged_decode in half precision."""

    name: str
    because: str
    body: str = ""
    header: str = ""


TYPES = [
    Fault(
        "a device pointer without its address space", "'const int *'", "const int* p = page_tables;"
    ),
    Fault("a device pointer as a constant one", "constant", "const constant int* p = page_tables;"),
    Fault("const dropped", "cannot initialize", "device int* p = page_tables;"),
    Fault("a store into an input", "read-only", "queries[0] = T(0.0f);"),
    Fault(
        "a threadgroup array as a device pointer",
        "cannot initialize",
        "threadgroup float shared[4];\ndevice float* p = shared;",
    ),
    Fault(
        "a cast between address spaces",
        "C-style cast",
        "threadgroup T* p = (threadgroup T*)queries;",
    ),
    Fault("a thread reference to a device object", "float", "thread float& first = partials[0];"),
    Fault(
        "a helper that takes any pointer",
        "no matching function",
        "partials[0] = first(numbers);",
        "inline float first(const thread float* p) { return p[0]; }\n",
    ),
    Fault("max of int and uint", "ambiguous", "int most = max(page_tables[0], 3u);"),
    Fault("max of float and half", "ambiguous", "float most = max(numbers[0], half(1.0f));"),
    Fault("simd_sum of a long", "ambiguous", "long sum = simd_sum(long(page_tables[0]));"),
    Fault("float to half", "loses floating-point precision", "half h = numbers[0];"),
    Fault("float to bfloat", "loses floating-point precision", "bfloat b = numbers[0];"),
    Fault("bfloat to half", "cannot initialize", "half h = bfloat(numbers[0]);"),
    Fault(
        "an offset cut to 32 bits", "loses integer precision", "int n = long(page_tables[0]) * D;"
    ),
    Fault("a double", "double", "double d = 1.0;"),
    Fault("a half to a double", "double", "double d = half(1.0f);"),
    Fault("float and half vectors added", "vector", "float4 v = float4(1.0f) + half4(half(1.0f));"),
    Fault("four components into three", "cannot initialize", "float3 v = float4(1.0f);"),
    Fault("a vector with too few parts", "number of parts", "float4 v = float4(1.0f, 2.0f);"),
    Fault(
        "a dot product of bfloat vectors",
        "no matching function",
        "bfloat4 v = bfloat4(bfloat(1.0f));\npartials[0] = dot(v, v);",
    ),
    Fault(
        "a matrix loaded from another type",
        "no matching function",
        "simdgroup_matrix<float, 8, 8> m;\nsimdgroup_load(m, queries, 8);",
    ),
    Fault("a matrix of integers", "half, bfloat or float", "simdgroup_matrix<int, 8, 8> m;"),
    Fault("a matrix of another shape", "8x8 only", "simdgroup_matrix<float, 4, 4> m;"),
    Fault("a function Metal lacks", "expm1", "float e = fast::expm1(numbers[0]);"),
    Fault("a function of C", "expf", "float e = expf(numbers[0]);"),
    Fault("a template argument misspelt", "PARTZ", "int n = PARTZ;"),
    Fault("an index outside a private array", "past the end", "float a[4];\na[4] = numbers[0];"),
    Fault("a variable never set", "uninitialized", "float a;\npartials[0] = a;"),
    Fault(
        "a name that hides another",
        "shadow",
        "int n = 1;\nfor (int i = 0; i < n; i++) { int n = i; }",
    ),
    Fault(
        "a helper without a return",
        "return",
        "partials[0] = forgotten(page_tables[0]);",
        "inline float forgotten(int x) { if (x > 0) return 1.0f; }\n",
    ),
    Fault("if constexpr", "C++17", "if constexpr (D > 64) partials[0] = 0.0f;"),
    Fault(
        "a fold expression",
        "C++17",
        "partials[0] = total(1.0f, 2.0f);",
        "template <typename... A> inline float total(A... a) { return (a + ...); }\n",
    ),
    Fault("a header of C", "file not found", header="#include <math.h>\n"),
    Fault(
        "a helper that names a template argument of the kernel",
        "undeclared identifier 'PARTS'",
        "int n = f(1);",
        "inline int f(int x) { return x * PARTS; }\n",
    ),
]

LANGUAGE = [
    Fault(
        "a function pointer",
        "pointers to functions",
        "float (*f)(float) = &square;\npartials[0] = f(numbers[0]);",
        "inline float square(float x) { return x * x; }\n",
    ),
    Fault("a mutable global", "constant address space", "count += 1;", "int count = 0;\n"),
    Fault(
        "a variable length array", "variable length array", "float a[page_tables[0]];\na[0] = 1.0f;"
    ),
]

RULES = [
    Fault(
        "recursion",
        "'f' calls itself",
        "int n = f(page_tables[0]);",
        "inline int f(int n) { return n < 2 ? 1 : n * f(n - 1); }\n",
    ),
    Fault(
        "mutual recursion",
        "'f' calls itself",
        "int n = f(page_tables[0]);",
        "int g(int n);\ninline int f(int n) { return g(n); }\ninline int g(int n) { return f(n); }\n",
    ),
    Fault("a virtual function", "virtual", header="struct A { virtual int f() { return 1; } };\n"),
    Fault("new", "Metal has no new", "int n = *(new int(1));"),
    Fault("an exception", "Metal has no exceptions", "if (page_tables[0] < 0) throw 1;"),
    Fault("goto", "Metal has no goto", "goto end;\nend: partials[0] = 0.0f;"),
    Fault("a static variable", "no static", "static int count;\ncount += 1;"),
    Fault("the standard library", "standard library", "int n = std::max(1, 2);"),
    Fault(
        "a threadgroup variable in a loop",
        "inside a block",
        "for (int i = 0; i < 2; i++) {\nthreadgroup float a[4];\na[0] = 0.0f;\n}",
    ),
    Fault(
        "a threadgroup variable in a helper",
        "inside a block",
        "partials[0] = f(1.0f);",
        "inline float f(float x) {\nif (x > 0.0f) {\nthreadgroup float a[4];\na[0] = x;\n}\nreturn x;\n}\n",
    ),
    Fault(
        "a threadgroup variable with a value",
        "initialiser",
        "threadgroup float a[4] = {0.0f, 0.0f, 0.0f, 0.0f};",
    ),
]

INDICES = [
    Fault(
        "a page as a factor of 32 bits",
        "'page' must be 64 bits wide",
        "const int page = page_tables[0];\npartials[page * 8 + 1] = 0.0f;",
    ),
    Fault(
        "a sum with a tile as a factor",
        "'tile' must be 64 bits wide",
        "const uint tile = 3u;\npartials[(tile + 1u) * 8u] = 0.0f;",
    ),
    Fault(
        "a shifted page",
        "'page' must be 64 bits wide",
        "const int page = page_tables[0];\npartials[page << 4] = 0.0f;",
    ),
    Fault(
        "an element of a list as a factor",
        "an element must be 64 bits wide",
        "partials[partitions[1] * D] = 0.0f;",
    ),
    Fault(
        "a row as a parameter of 32 bits",
        "'row' must be 64 bits wide",
        "partials[0] = at(numbers, page_tables[0], 8);",
        "inline float at(const device float* p, int row, int D) { return p[row * D]; }\n",
    ),
    Fault(
        "a slot of 32 bits as an argument",
        "'slot' must be 64 bits wide",
        "const int slot = page_tables[0];\npartials[0] = at(numbers, slot, 8);",
        "inline float at(const device float* p, long row, int D) { return p[row * D]; }\n",
    ),
]

RESOURCES = [
    Fault(
        "too much threadgroup memory",
        "bytes of threadgroup memory",
        "threadgroup float a[8192];\na[page_tables[0]] = 0.0f;",
    ),
    Fault(
        "a private array with an index known at run time",
        "stays in memory: [8 x float]",
        "float a[8];\n"
        "for (int i = 0; i < 8; i++) a[i] = numbers[i];\n"
        "partials[0] = a[page_tables[0] & 7];",
    ),
    Fault(
        "a loop over a private array that is not unrolled",
        "stays in memory: [400 x float]",
        "float a[400];\n"
        "for (int i = 0; i < 400; i++) a[i] = numbers[i & 7];\n"
        "for (int i = 0; i < 400; i++) partials[i] = a[399 - i] * numbers[i & 3];",
    ),
]
FAULTS = [*TYPES, *LANGUAGE, *RULES, *INDICES, *RESOURCES]


@pytest.fixture(scope="module")
def decode() -> KernelText:
    """With one query head per kv head, where no array needs a pragma."""
    wanted = {"T": mx.float16, "D": 128, "GROUP": 1}
    return next(
        text
        for text in some_texts()
        if text.kernel == "paged_decode" and wanted.items() <= dict(text.template).items()
    )


def plant(text: str, body: str, header: str) -> str:
    """The fault at the start of the kernel's body."""
    before, start, kernel = text.partition("[[kernel]]")
    planted = kernel.replace(END_OF_SIGNATURE, f"{END_OF_SIGNATURE}{body}\n", 1)
    return header + before + start + planted


def test_the_text_without_a_fault_is_accepted(decode: KernelText) -> None:
    harmless = "int fine = page_tables[0];\npartials[0] = float(fine);"
    assert check(decode.text).faults == ()
    assert check(plant(decode.text, harmless, "inline int f(int x) { return x; }\n")).faults == ()


def test_the_table_has_more_than_32_faults() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 32


def test_a_planted_fault_is_refused(decode: KernelText) -> None:
    for fault in FAULTS:
        faults = check(plant(decode.text, fault.body, fault.header)).faults
        assert any(fault.because in message for message in faults), (fault.name, faults)


def test_a_small_input_named_as_a_device_pointer_is_refused(decode: KernelText) -> None:
    body = "const device int* p = page_tables;"
    assert check(plant(decode.text, body, "")).faults == ()
    small = decode.text.replace(
        "const device int32_t* page_tables ", "const constant int32_t* page_tables "
    )
    assert small != decode.text
    assert any("cannot initialize" in message for message in check(plant(small, body, "")).faults)


def test_a_number_narrowed_in_bfloat_only_is_refused() -> None:
    """`T(x)` may be left out in float32 and not in bfloat16: all dtypes have to be read."""
    found = {}
    for text in some_texts():
        dtype = dict(text.template)["T"]
        if text.kernel == "merge_partitions" and dtype not in found:
            found[dtype] = check(plant(text.text, "out[0] = numbers[0];", "")).errors
    assert found[mx.float32] == ()
    assert all("precision" in found[dtype][0] for dtype in (mx.float16, mx.bfloat16))
