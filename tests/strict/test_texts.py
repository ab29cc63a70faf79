"""Every kernel text that the project can generate passes the strict front end."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from metal_kernels.kernels import ALL, REPLAY_DELTA, REPLAY_SSM
from metal_kernels.latents import LATENT_DIMS
from metal_kernels.limits import HEAD_DIMS
from metal_kernels.metal import DTYPES
from tests.strict.check import Report, check_all
from tests.strict.texts import KernelText, every_text, head_dims, representative

MAX_THREADS = 256  # of a threadgroup: an M1 has no registers for many more (see HeadSplit.threads)


@pytest.fixture(scope="module")
def texts() -> Sequence[KernelText]:
    return every_text()


@pytest.fixture(scope="module")
def some(texts: Sequence[KernelText]) -> dict[KernelText, Report]:
    return check_all(representative(texts))


def refused(reports: dict[KernelText, Report]) -> dict[str, Sequence[str]]:
    return {text.label: report.errors for text, report in reports.items() if report.errors}


def too_large(reports: dict[KernelText, Report]) -> dict[str, int]:
    return {
        text.label: report.threadgroup_bytes
        for text, report in reports.items()
        if report.threadgroup_bytes > 32 << 10
    }


def in_memory(reports: dict[KernelText, Report]) -> dict[str, Sequence[str]]:
    """Private arrays that are not in registers, because a loop over them was not unrolled."""
    return {text.label: report.in_memory for text, report in reports.items() if report.in_memory}


@pytest.mark.long
def test_every_kernel_is_among_the_texts(texts: Sequence[KernelText]) -> None:
    assert {text.kernel for text in texts} == {spec.name for spec in ALL}


@pytest.mark.long
def test_every_dtype_and_head_dimension_is_among_the_texts(texts: Sequence[KernelText]) -> None:
    templates = [dict(text.template) for text in texts]
    found = {(template["T"], template.get("D")) for template in templates}
    assert found >= {(dtype, dim) for dtype in DTYPES for dim in HEAD_DIMS}
    latents = {(t["T"], (t["LATENT"], t["ROPE"])) for t in templates if "LATENT" in t}
    assert latents == {(dtype, dims) for dtype in DTYPES for dims in LATENT_DIMS}
    assert {key_dim for key_dim, _ in head_dims(DTYPES[0])} >= set(HEAD_DIMS)


@pytest.mark.long
def test_rows_of_drafts_are_among_the_texts_in_every_dtype(texts: Sequence[KernelText]) -> None:
    """Rows in half precision with states in it and in float32, and states alone."""
    wanted = {(dtype, dtype) for dtype in DTYPES} | {(mx.float32, dtype) for dtype in DTYPES}
    for kernel in (REPLAY_DELTA.name, REPLAY_SSM.name):
        of_kernel = [dict(text.template) for text in texts if text.kernel == kernel]
        assert {(each["S"], each["T"]) for each in of_kernel if not each["KEEPS"]} == wanted
        assert {each["S"] for each in of_kernel if each["KEEPS"]} == set(DTYPES)


@pytest.mark.long
def test_no_text_occurs_twice(texts: Sequence[KernelText]) -> None:
    assert len({text.text for text in texts}) == len(texts) > 500


@pytest.mark.long
def test_no_threadgroup_has_more_threads_than_every_gpu_has_registers_for(
    texts: Sequence[KernelText],
) -> None:
    assert max(text.threads for text in texts) <= MAX_THREADS


@pytest.mark.long
def test_a_few_texts_of_each_kernel_are_accepted(some: dict[KernelText, Report]) -> None:
    assert {text.kernel for text in some} == {spec.name for spec in ALL}
    assert refused(some) == {}
    assert too_large(some) == {}
    assert in_memory(some) == {}


@pytest.mark.long
def test_every_text_is_accepted(texts: Sequence[KernelText]) -> None:
    reports = check_all(texts)
    assert refused(reports) == {}
    assert too_large(reports) == {}
    assert in_memory(reports) == {}
