"""Kernel specs and kernel texts agree."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest

import metal_kernels
from metal_kernels.kernels import ALL, HEADERS, MERGE_PARTITIONS, Dispatch, Kernels, KernelSpec

FOLDER = Path(metal_kernels.__file__).parent / "msl"
# What a header declares: functions and their overloads, types and constants.
DECLARED = re.compile(
    r"METAL_FUNC [^(]*?(\w+)\(|(?:struct|float|uint) (\w+) [{=]|typedef .*? (\w+);"
)


def text(spec: KernelSpec) -> str:
    return (FOLDER / f"{spec.name}.metal").read_text()


def test_every_text_has_a_kernel_and_every_kernel_a_text() -> None:
    files = {f"{spec.name}.metal" for spec in ALL} | set(HEADERS)
    assert {file.name for file in FOLDER.iterdir()} == files


def test_a_kernel_has_the_header_of_the_names_in_its_text_and_no_other() -> None:
    declared = {
        file: {word for match in DECLARED.findall(header) for word in match if word}
        for file, header in HEADERS.items()
    }
    assert {"LOWEST", "FloatPair", "matrix_line", "Softmax", "row_quad"} <= declared["attention.h"]
    assert {"INFINITE", "magnitude", "scale_of"} <= declared["quantise.h"]
    assert {"fragment_line", "fragment_column", "add_product"} <= declared["cooperative.h"]
    for spec, (file, words) in product(ALL, declared.items()):
        uses = words & set(re.findall(r"\w+", spec.source()))
        assert (HEADERS[file] in spec.header) == bool(uses), (spec, uses)


def test_a_text_begins_with_the_layout_of_its_buffers() -> None:
    for spec in ALL:
        opening = text(spec).split("\n\nconstexpr")[0].replace("after_a/b", "after_a, after_b")
        assert all(line.startswith("//") for line in opening.splitlines()), spec
        for name in (*spec.inputs, *spec.outputs):
            assert re.search(rf"^// ([a-z_, ]*\b)?{name}\b.*\(", opening, re.MULTILINE), name


def test_the_compiled_text_has_no_comments_and_the_same_lines() -> None:
    for spec in ALL:
        source = spec.source()
        assert "//" not in spec.header + source, spec
        assert source.count("\n") == text(spec).count("\n"), spec
        # mlx copies and hashes it at every evaluation
        assert len(spec.header + source) < 12_000, spec
    for file, header in HEADERS.items():
        assert header.count("\n") == (FOLDER / file).read_text().count("\n")


def merge(**fixed: mx.array) -> Dispatch:
    """A merge whose kernel returns its inputs."""
    kernels = Kernels(lambda _spec, _source: lambda *, inputs, **_: inputs)
    outputs = {"out": ((2, 4, 64), mx.float32)}
    return kernels.dispatch(MERGE_PARTITIONS, fixed, outputs, (), (1, 1, 1), (1, 1, 1))


def test_an_input_too_small_for_its_address_space_is_refused() -> None:
    with pytest.raises(AssertionError, match="starts has 7 elements"):
        merge(starts=mx.zeros(7))


def test_inputs_are_passed_in_the_order_of_the_signature() -> None:
    arrays = {name: mx.zeros(8 + at) for at, name in enumerate(MERGE_PARTITIONS.inputs)}
    first, *fixed = MERGE_PARTITIONS.inputs
    dispatch = merge(**{name: arrays[name] for name in reversed(fixed)})
    for _ in range(2):
        assert [each.size for each in dispatch(**{first: arrays[first]})] == [8, 9, 10, 11]


def test_a_call_without_an_input_is_refused() -> None:
    with pytest.raises(AssertionError, match="partials"):
        merge(starts=mx.zeros(8))(partials=mx.zeros(8))
