"""The check-up detects a wrong or refused kernel."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import checkup
from metal_kernels.checkup import OpCheck, check_ops
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.metal import DTYPES, MetalBackend
from metal_kernels.numpy_attention import attend
from metal_kernels.ops import Backend
from metal_kernels.reading import read
from metal_kernels.reference import ReferenceBackend
from metal_kernels.x86.backend import X86Backend
from tests.emulated import emulated_factory

OPS = [
    *("write_kv", "copy_pages", "rotate_and_write"),
    *("paged_decode", "grouped_decode", "paged_prefill"),
    *("draft_decode", "grouped_drafts"),
]
OTHERS = ["qmv_rows", "replay_delta", "replay_ssm"]  # which read no pools
NUM_CHECKS = len(DTYPES) * (2 * len(OPS) + len(OTHERS))


def failing(backend: MetalBackend) -> set[str]:
    return {check.op for check in check_ops(backend, [64], []) if not check.is_right}


def do_nothing(**arguments: Any) -> list[mx.array]:
    """A kernel that is not compiled: the check-up has seventy, of 0.3 s of CPU each in an empty cache."""
    shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
    return [mx.zeros(shape, dtype) for shape, dtype in shapes]


def spoiled(*kernels: str, refused: str = "", error: Exception | None = None) -> MetalBackend:
    """Emulated kernels, of which some do nothing, and one raises `error`."""
    make = emulated_factory()

    def refuse(**_: Any) -> list[mx.array]:
        assert error is not None
        raise error

    def factory(spec: Any, source: str) -> Any:
        if spec.name == refused:
            return refuse
        return do_nothing if spec.name in kernels else make(spec, source)

    return MetalBackend(factory)


@pytest.mark.long
def test_every_op_of_every_dtype_is_right(fast_backend: MetalBackend) -> None:
    checks = list(check_ops(fast_backend, [64], []))
    assert [(check.dtype, check.is_quantised, check.op) for check in checks] == [
        (dtype, is_quantised, op)
        for dtype in DTYPES
        for is_quantised in (False, True)
        for op in (OPS if is_quantised else OPS + OTHERS)
    ]
    for check in checks:
        assert check.is_right, check
        if check.op != "rotate_and_write":  # in float32 its products may be numpy's
            assert (check.error == 0) == (check.op in ("write_kv", "copy_pages"))


def test_kernels_that_do_nothing_are_found() -> None:
    own = {*OPS[1:], *OTHERS}
    assert failing(spoiled(*own)) == own


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("write_kv_pages", "write_kv"),
        ("write_kv_tokens", "write_kv"),
        ("merge_partitions", "paged_decode"),
        ("quantise_kv", "write_kv"),
    ],
)
def test_a_kernel_of_other_ops_that_does_nothing_is_found(kernel: str, op: str) -> None:
    assert op in failing(spoiled(kernel))


DECODES = [op for op in OPS if op.endswith(("_decode", "_drafts"))]


@pytest.mark.parametrize(
    "dtype",
    [mx.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES if d != mx.bfloat16)],
    ids=str,
)
def test_a_long_row_that_is_slightly_wrong_is_found_beside_a_short_one(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 % of a row of 301 positions are 0.3 % of the largest number of one that sees a single position."""
    monkeypatch.setattr(checkup, "DTYPES", (dtype,))
    make = emulated_factory()
    share = 1.0

    def factory(spec: Any, source: str) -> Any:
        if spec.name not in (*DECODES, "merge_partitions", "write_kv_pages", "write_kv_tokens"):
            return do_nothing
        kernel = make(spec, source)

        def call(**arguments: Any) -> list[mx.array]:
            if ("IS_QUANTISED", 1) in arguments["template"]:
                return do_nothing(**arguments)
            outputs = kernel(**arguments)
            if spec.name == "merge_partitions":
                shrunk = mx.array([1, 1, share])[:, None, None]
                outputs[0] = (outputs[0] * shrunk).astype(outputs[0].dtype)
            return outputs

        return call

    def right() -> set[str]:
        checks = check_ops(MetalBackend(factory), [64], [])
        return {check.op for check in checks if check.is_right and not check.is_quantised}

    assert right() == {"write_kv", *DECODES}
    share = 0.95
    assert right() == {"write_kv"}


REFUSED_TEXT = RuntimeError("[metal::Device] Unable to build metal library from source\nerror: x")
TOO_MANY_THREADS = ValueError("[metal_kernel] Thread group size (512) is greater than 448")


def test_a_refused_kernel_is_a_result_and_the_others_are_checked() -> None:
    others = {*OPS[2:], *OTHERS} - {"paged_decode"}
    backend = spoiled(*others, refused="paged_decode", error=TOO_MANY_THREADS)
    checks = list(check_ops(backend, [64], []))
    assert len(checks) == NUM_CHECKS
    for check in checks:
        assert check.is_right == (check.op in OPS[:2]), check
        assert check.refusal == (str(TOO_MANY_THREADS) if check.op == "paged_decode" else None)


def test_nothing_is_said_about_other_ops_where_no_pool_can_be_written() -> None:
    backend = spoiled(*OPS[2:], *OTHERS, refused="write_kv_pages", error=REFUSED_TEXT)
    checks = list(check_ops(backend, [64], []))
    assert all(check.refusal is None for check in checks if check.is_quantised)
    checks = [check for check in checks if not check.is_quantised]
    reasons = {check.op: check.refusal for check in checks}
    because = "not checked, because write_kv does not run"
    assert reasons == {
        "write_kv": str(REFUSED_TEXT),
        **dict.fromkeys([*OPS[1:], *OTHERS], because),
    }


def in_tf32(array: mx.array) -> mx.array:
    bits = read(array).view(np.int32) & ~0x1FFF  # 10 of 23 bits of mantissa stay
    return mx.array(bits.view(np.float32))


@pytest.mark.long
def test_products_of_mlx_in_tf32_do_not_make_a_right_kernel_wrong(
    monkeypatch: pytest.MonkeyPatch, fast_backend: MetalBackend
) -> None:
    """As on an M5, where mlx's own float32 products are the less exact side."""
    exact = mx.einsum, mx.matmul, mx.fast.scaled_dot_product_attention

    def einsum(subscripts: str, *operands: mx.array) -> mx.array:
        return exact[0](subscripts, *map(in_tf32, operands))

    def matmul(a: mx.array, b: mx.array) -> mx.array:
        return exact[1](in_tf32(a), in_tf32(b))

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return exact[2](*map(in_tf32, (q, k, v)), **options)

    monkeypatch.setattr(mx, "einsum", einsum)
    monkeypatch.setattr(mx, "matmul", matmul)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    checks = [check for check in check_ops(fast_backend, [64], []) if check.dtype == mx.float32]
    assert [check.op for check in checks] == OPS + OTHERS + OPS
    assert all(check.is_right for check in checks), checks


@pytest.mark.parametrize("backend", [X86Backend(), ReferenceBackend()], ids=["cpu", "reference"])
def test_attention_over_latents_is_checked(backend: Backend) -> None:
    checks = list(check_ops(backend, [], [(256, 64)]))
    assert [(check.op, check.dtype) for check in checks] == [("paged_latent", d) for d in DTYPES]
    assert all(0 < check.error <= check.tolerance for check in checks), checks


@pytest.mark.long
def test_attention_over_latents_by_kernels_is_right(fast_backend: MetalBackend) -> None:
    checks = list(check_ops(fast_backend, []))
    assert len(checks) == len(DTYPES) * len(LATENT_DIMS)
    assert all(check.is_right for check in checks), checks


def test_wrong_or_refused_attention_over_latents_is_found() -> None:
    class Unscaled(X86Backend):
        def paged_latent(self, *args: Any, scale: float) -> mx.array:
            return super().paged_latent(*args, scale=1.5 * scale)

    assert not any(check.is_right for check in check_ops(Unscaled(), [], [(256, 64)]))
    checks = list(
        check_ops(spoiled(refused="paged_latent", error=TOO_MANY_THREADS), [], [(256, 64)])
    )
    assert [check.refusal for check in checks] == [str(TOO_MANY_THREADS)] * len(DTYPES)


def test_the_right_answer_is_softmax_of_the_visible_keys() -> None:
    """One head, written out position by position."""
    random = np.random.default_rng(0)
    queries, keys, values = (random.standard_normal((rows, 1, 4), np.float32) for rows in (2, 5, 5))
    for row, last in ((0, 4), (1, 5)):
        weights = np.exp([float(queries[row, 0] @ key[0]) / 2 for key in keys[:last]])
        expected = sum(w * v[0] for w, v in zip(weights, values[:last], strict=True))
        expected /= weights.sum()
        got = attend(queries, keys, values)[row, 0]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_query_heads_of_a_group_share_their_kv_head() -> None:
    random = np.random.default_rng(0)
    queries = random.standard_normal((3, 6, 4), np.float32)
    keys, values = (random.standard_normal((7, 2, 4), np.float32) for _ in range(2))
    whole = attend(queries, keys, values)
    for head in range(6):
        of_head = slice(head // 3, head // 3 + 1)
        alone = attend(queries[:, head : head + 1], keys[:, of_head], values[:, of_head])
        np.testing.assert_allclose(whole[:, head : head + 1], alone, rtol=1e-5)


def test_an_error_of_nan_is_not_right() -> None:
    assert not OpCheck("paged_decode", mx.float16, 64, float("nan"), 1.0).is_right
