"""Kernel specs and kernel texts agree."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

import metal_kernels
from metal_kernels.kernels import ALL, MERGE_PARTITIONS, Kernels, KernelSpec

FOLDER = Path(metal_kernels.__file__).parent / "msl"


def text(spec: KernelSpec) -> str:
    return (FOLDER / f"{spec.name}.metal").read_text()


def test_every_text_has_a_kernel_and_every_kernel_a_text() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {spec.name for spec in ALL}


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_a_text_begins_with_the_layout_of_its_buffers(spec: KernelSpec) -> None:
    opening = text(spec).split("\n\nconstexpr")[0].replace("after_a/b", "after_a, after_b")
    assert all(line.startswith("//") for line in opening.splitlines())
    for name in (*spec.inputs, *spec.outputs):
        assert re.search(rf"^// ([a-z_, ]*\b)?{name}\b.*\(", opening, re.MULTILINE), name


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_the_compiled_text_has_no_comments_and_the_same_lines(spec: KernelSpec) -> None:
    source = spec.source()
    assert "//" not in source
    assert source.count("\n") == text(spec).count("\n")
    assert len(source) < 10_000  # mlx copies and hashes it at every evaluation


def test_an_input_too_small_for_its_address_space_is_refused() -> None:
    with pytest.raises(AssertionError, match="partials has 7 elements"):
        Kernels(lambda _spec, _source: lambda **_: [])(
            MERGE_PARTITIONS, {"partials": mx.zeros(7)}, {}, (), (1, 1, 1), (1, 1, 1)
        )
