import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import UnsupportedModel
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


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(header: Any, size: int = 29, length: int | None = None) -> Path:
        data = header if isinstance(header, bytes) else json.dumps(header).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(
            struct.pack("<Q", len(data) if length is None else length) + data + bytes(size)
        )
        return file

    return write_file


def test_a_header_that_describes_its_file_is_good(write):
    check_weights(write(GOOD), "m")


def test_the_embedded_models_own_are_good():
    for file in model_path().glob("*.safetensors"):
        check_weights(file, "m")


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
def test_a_header_that_lies_is_refused_before_anything_is_loaded(write, header, reason):
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        check_weights(write(header), "m")
    assert "damaged or forged" in str(refused.value)


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**31, 2**64 - 1])
def test_a_header_of_gigabytes_is_not_read(write, length):
    with pytest.raises(UnsupportedModel, match="header claims to be"):
        check_weights(write(GOOD, length=length), "m")


@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/null", "nothing"])
def test_a_link_to_something_else_is_refused_as_that(tmp_path, target):
    link = tmp_path / "model.safetensors"
    link.symlink_to(target)
    with pytest.raises(
        UnsupportedModel, match=r"no header|header claims to be|cannot be read"
    ) as refused:
        check_weights(link, "m")
    assert "root:" not in str(refused.value)


def test_a_file_without_a_header_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(UnsupportedModel, match="no header"):
        check_weights(tmp_path / "model.safetensors", "m")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        check_weights(tmp_path / "other.safetensors", "m")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=200))
def test_no_bytes_are_more_than_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "random.safetensors"
    file.write_bytes(data)
    try:
        check_weights(file, "m")
    except UnsupportedModel:
        return
    assert json.loads(data[8:]) is not None
