"""From Metal to C++, token by token."""

import pytest

from tests.emulator import MetalSourceError
from tests.emulator.frontend import translate
from tests.emulator.tokens import TokenList

KERNEL = "kernel void k(device float* out [[buffer(0)]]) {{ {} }}"


def body(text: str) -> str:
    """What becomes of a statement in a kernel."""
    out = translate(KERNEL.format(text), "k", {}, "c++", lint=False).text
    return out.split("{", 1)[1].split('# 1 "entry point"')[0].rsplit("}", 1)[0].strip()


def rewritten(source: str, constants: dict[int | str, bool | int | float] | None = None) -> str:
    text = translate(source + KERNEL.format(""), "k", constants or {}, "c++", lint=False).text
    return text.split("void k(")[0].strip()


@pytest.mark.parametrize(
    ("metal", "host"),
    [
        ("float x = 1.0;", "float x = 1.0f;"),
        ("float x = .5e-3 + 2.f;", "float x = .5e-3f + 2.f;"),
        ("half x = 2.5h + 1h;", "half x = half(2.5f) + half(1.f);"),
        ("bfloat x = 1.0bf;", "bfloat x = bfloat(1.0f);"),
        ("int x = 0x1e5 + 7 + 3u;", "int x = 0x1e5 + 7 + 3u;"),
        ("float4 v = float4(a, b.xy, 1);", "float4 v = metal::__make<float4>(a, b.xy, 1);"),
        ("auto v = vec<T, 2>(x);", "auto v = metal::__make<vec<T, 2>>(x);"),
        ("half2 v(a, 1.0);", "half2 v = metal::__make<half2>(a, 1.0f);"),
        ("float4 v = (float4)h[1].q;", "float4 v = metal::__make<float4>(h[1].q);"),
        ("x = static_cast<float2>(y);", "x = metal::__static_cast<float2>(y);"),
        ("x = static_cast<int>(y);", "x = static_cast<int>(y);"),
        ("v = p.float2(1);", "v = p.float2(1);"),
        ("using V = float2; V v = V(1);", "using V = float2; V v = metal::__make<V>(1);"),
        ("threadgroup float* p = q;", "threadgroup float* p = q;"),
    ],
)
def test_what_is_not_cxx_is_rewritten(metal: str, host: str) -> None:
    assert body(metal) == host


def test_threadgroup_variables_are_placed_by_the_runtime() -> None:
    out = body("threadgroup float a[4][N], b;")
    assert "typedef float __tgt0 [ 4 ] [ N ]; threadgroup __tgt0 &a = " in out
    assert '__msl_tg_var(4, sizeof(__tgt0), alignof(__tgt0), "a")' in out
    assert "typedef float __tgt1 ; threadgroup __tgt1 &b = " in out


def test_function_constants_become_constants_of_the_text() -> None:
    source = (
        "constant bool a [[function_constant(0)]]; constant int b [[function_constant(1)]];"
        "constant float c [[function_constant(2)]];"
    )
    out = rewritten(source, {0: True, "c": 0.5})
    assert "static constexpr constant bool a = True".replace("True", "true") in out
    assert "static constexpr constant int b = 0;" in out
    assert "static constexpr constant float c = 0.5f;" in out


def test_arrays_in_a_parameter_list_become_pointers() -> None:
    out = rewritten("void f(constant int64_t s[2], device float x[]) {}")
    assert "constant int64_t*s" in out
    assert "device float*x" in out


def test_members_of_objects_elsewhere_are_dropped() -> None:
    source = "struct S { int f() const { return 1; } int f() const device { return 2; } };"
    assert rewritten(source).replace(" ", "") == "structS{intf()const{return1;}};"


def test_lines_stay_where_they_were() -> None:
    metal = (
        '# 7 "mine.metal"\n[[kernel]]\nvoid k(\n  device float* out [[buffer(0)]],\n'
        "  uint i [[thread_position_in_grid]]) {\n  threadgroup float t[\n    4];\n"
        "  out[i] = float2(1,\n    2).x; // last\n}\n"
    )
    out = translate(metal, "k", {}, "c++", lint=False).text
    lines = metal.splitlines()
    at = next(k for k, line in enumerate(out.splitlines()) if "// last" in line)
    assert at == next(k for k, line in enumerate(lines) if "// last" in line)


def test_messages_carry_file_and_line() -> None:
    with pytest.raises(MetalSourceError, match=r"^mine\.metal:8: Metal has no double$"):
        translate('# 7 "mine.metal"\n\ndouble x;', "k", {}, "c++", lint=False)
    with pytest.raises(MetalSourceError, match=r"^mine\.metal:7: '\(' is never closed$"):
        translate('# 7 "mine.metal"\nkernel void k(', "k", {}, "c++", lint=False)


def test_the_rules_let_sound_code_pass() -> None:
    source = (
        "typedef float4 V;\n"
        "inline float f(const thread float* p, threadgroup V& v, constant int* n) {\n"
        "  const device float* q = nullptr; auto r = p; float x = 2 * *p; if (x * 2 > 1) return x;\n"
        "  return g(p) * f2(x); }\n"
    )
    out = translate(source + KERNEL.format("out[0] = a * b;"), "k", {}, "c++", lint=True)
    assert out.warnings == ()


def test_the_rules_name_what_metal_would_refuse() -> None:
    source = "float f(float* p) { int* q = p; return f(p); }\n"
    out = translate(source + KERNEL.format(""), "k", {}, "c++", lint=True)
    assert out.warnings == (
        "<source>:1: 'float * p' of 'f' needs an address space "
        "(thread, threadgroup, device or constant)",
        "<source>:1: 'int * q' needs an address space",
        "<source>:1: 'f' calls itself; Metal kernels cannot recurse",
    )


def test_tokens_give_back_the_text_they_came_from() -> None:
    text = 'a[[b]] >= 1.5e-3f; "x\\"y" << \'c\' # not a line\n# 3 "f"\n\tz->q::r...'
    assert TokenList.of(text).joined() == text
