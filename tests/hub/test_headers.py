"""A weight file is accepted only if its header matches it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.embedded import model_path
from mlxserve.hub.headers import MAX_HEADER, check_weights

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "mlx"},
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [16, 28]},
    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [28, 28]},
    "one": {"dtype": "U8", "shape": [], "data_offsets": [28, 29]},
}


def tensor(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a weight file with this header and `size` bytes of data."""

    def write_file(header: Any, size: int = 29, length: int | None = None) -> Path:
        data = header if isinstance(header, bytes) else json.dumps(header).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(
            struct.pack("<Q", len(data) if length is None else length) + data + bytes(size)
        )
        return file

    return write_file


def test_a_header_that_matches_its_file_is_accepted(write: Write) -> None:
    check_weights(write(GOOD), "m")


def test_the_headers_of_the_embedded_model_are_accepted() -> None:
    files = list(model_path().glob("*.safetensors"))
    assert files
    for file in files:
        check_weights(file, "m")


def test_the_embedded_model_with_a_byte_missing_is_refused(tmp_path: Path) -> None:
    [whole] = model_path().glob("*.safetensors")
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(UnsupportedModel, match="damaged or forged"):
        check_weights(tmp_path / whole.name, "m")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": tensor("F32", [7], 0, 28)}, "end at byte 28 of 29"),
        ({"a": tensor("F32", [8], 0, 32)}, "end at byte 32"),
        ({"a": tensor("U8", [20], 0, 20), "b": tensor("U8", [20], 9, 29)}, "does not start where"),
        ({"a": tensor("U8", [9], 0, 9), "b": tensor("U8", [9], 20, 29)}, "does not start where"),
        ({"a": tensor("U8", [29], 0, 29), "b": tensor("U8", [29], 0, 29)}, "does not start where"),
        ({"a": tensor("F32", [29], 0, 29)}, "does not match its shape"),
        ({"a": tensor("U8", [2**62, 4], 0, 29)}, "does not match its shape"),
        ({"a": tensor("U8", [2**63], 0, 29)}, "is not a list of sizes"),
        ({"a": tensor("U8", [-29], 0, 29)}, "is not a list of sizes"),
        ({"a": tensor("U8", [True], 0, 1)}, "is not a list of sizes"),
        ({"a": tensor("U8", [1] * 17, 0, 1)}, "is not a list of sizes"),
        ({"a": tensor("U8", [29], 29, 0)}, "does not match its shape"),
        ({"a": tensor("U8", [29], 0)}, "are not two sizes"),
        ({"a": tensor("U8", [29], 0, 29.0)}, "are not two sizes"),
        ({"a": tensor("OBJECT", [29], 0, 29)}, "'a' has the unknown type 'OBJECT'"),
        ({"a": []}, "is not an object"),
        ([], "not a JSON object"),
        (b"{", "Expecting"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_header_that_does_not_match_its_file_is_refused(
    write: Write, header: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        check_weights(write(header), "m")
    assert "damaged or forged" in str(refused.value)


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**31, 2**64 - 1])
def test_a_header_of_gigabytes_is_not_read(write: Write, length: int) -> None:
    with pytest.raises(UnsupportedModel, match="header claims to be"):
        check_weights(write(GOOD, length=length), "m")


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/null", "nothing"])
def test_a_link_to_another_file_is_refused_without_showing_its_content(
    tmp_path: Path, target: str
) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to(target)
    with pytest.raises(
        UnsupportedModel, match=r"no header|header claims to be|cannot be read"
    ) as refused:
        check_weights(link, "m")
    assert "root:" not in str(refused.value)


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(UnsupportedModel, match="no header"):
        check_weights(tmp_path / "model.safetensors", "m")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        check_weights(tmp_path / "other.safetensors", "m")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_accepted_without_other_errors(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "random.safetensors"
    file.write_bytes(data)
    try:
        check_weights(file, "m")
    except UnsupportedModel:
        return
    assert json.loads(data[8:]) is not None
