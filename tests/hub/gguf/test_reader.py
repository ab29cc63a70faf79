"""A header is read as written, and a damaged or forged one gives one sentence."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.gguf.reader import is_gguf, read_header
from tests.hub.gguf.files import write_gguf


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path) -> Path:
    metadata = {"general.name": "Small", "block_count": 2, "eps": 0.5, "flags": [True, False]}
    tensors = {
        "a.weight": np.arange(64, dtype=np.float32).reshape(2, 32),
        "b.weight": np.ones((3, 2, 64), np.float32),
    }
    return write_gguf(tmp_path / "small.gguf", "llama", metadata, tensors, {"b.weight": "Q8_0"})


def refusal(file: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        read_header(file)
    sentence = str(caught.value)
    assert len(sentence) < 400
    assert "\n" not in sentence
    return sentence


def header(*, tensors: int = 0, values: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_values_and_tensors_are_read(file: Path) -> None:
    found = read_header(file)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["llama.eps"] == 0.5
    assert found.metadata["llama.flags"] == [True, False]
    a, b = found.tensors["a.weight"], found.tensors["b.weight"]
    assert (a.shape, a.kind, a.nbytes) == ((2, 32), "F32", 256)
    assert (b.shape, b.kind, b.nbytes) == ((3, 2, 64), "Q8_0", 12 * 34)
    assert np.array_equal(np.fromfile(file, np.float32, 64, offset=a.offset), np.arange(64))


def test_another_header_has_another_digest(file: Path, tmp_path: Path) -> None:
    tensors = {"a.weight": np.ones((2, 32), np.float32)}
    other = write_gguf(tmp_path / "other.gguf", "llama", {"block_count": 3}, tensors)
    assert read_header(file).digest == read_header(file).digest != read_header(other).digest


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert "damaged" in refusal(file)


def test_random_damage_is_refused_or_read_but_never_fails_otherwise(file: Path) -> None:
    whole = file.read_bytes()
    for seed in range(60):
        draw = np.random.default_rng(seed)
        content = bytearray(whole)
        for at in draw.integers(4, 400, 3):
            content[at] = draw.integers(256)
        file.write_bytes(content)
        try:
            read_header(file)
        except UnsupportedModel:
            refusal(file)


FORGED = {
    "a count of values": header(values=1 << 60),
    "a count of tensors": header(tensors=1 << 60),
    "a length of a string": header(values=1, rest=struct.pack("<Q", 1 << 62)),
    "a length of an array": header(
        values=1, rest=string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 61)
    ),
    "an array of many strings": header(
        values=1, rest=string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 21)
    ),
    "an array of arrays": header(values=1, rest=string(b"k") + struct.pack("<IIQ", 9, 9, 1)),
    "a type of a value": header(values=1, rest=string(b"k") + struct.pack("<I", 77)),
    "many dimensions": header(tensors=1, rest=string(b"t") + struct.pack("<I", 1 << 30)),
    "a size of nothing": header(
        tensors=1, rest=string(b"t") + struct.pack("<IQQIQ", 2, 0, 4, 0, 0)
    ),
    "sizes that overflow": header(
        tensors=1, rest=string(b"t") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)
    ),
    "a type of blocks": header(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0)),
    "half a block": header(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 48, 8, 0)),
    "an offset": header(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 63)),
    "an offset between": header(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 7)),
    "an alignment": header(values=1, rest=string(b"general.alignment") + struct.pack("<II", 4, 0)),
    "two tensors of a name": header(
        tensors=2, rest=2 * (string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0))
    ),
    "tensors that overlap": header(
        tensors=2,
        rest=string(b"a")
        + struct.pack("<IQIQ", 1, 16, 0, 0)
        + string(b"b")
        + struct.pack("<IQIQ", 1, 8, 0, 32),
    ),
    "two values of a key": header(values=2, rest=2 * (string(b"k") + struct.pack("<II", 4, 7))),
    "two values of a key, of other types": header(
        values=2,
        rest=string(b"k") + struct.pack("<II", 4, 7) + string(b"k") + struct.pack("<IB", 0, 7),
    ),
    "an old version": header(version=1),
    "a big-endian file": header(version=3 << 24),
    "other contents": b"not a model at all",
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED.keys())
def test_a_forged_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "forged.gguf"
    file.write_bytes(content + bytes(64))
    assert "damaged or forged" in refusal(file)


def _placed(places: list[tuple[int, int]]) -> bytes:
    """A file of tensors of float32 at these (offset, number of values)."""
    rest = b"".join(
        string(f"t{number}".encode()) + struct.pack("<IQIQ", 1, size, 0, offset)
        for number, (offset, size) in enumerate(places)
    )
    content = header(tensors=len(places), rest=rest)
    return content + bytes(-len(content) % 32 + 1_024)


def test_tensors_that_share_a_byte_are_refused_and_no_others(tmp_path: Path) -> None:
    file, outcomes = tmp_path / "placed.gguf", []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        places = [
            (32 * int(draw.integers(20)), int(draw.integers(1, 40)))
            for _ in range(draw.integers(1, 5))
        ]
        taken = [byte for offset, size in places for byte in range(offset, offset + 4 * size)]
        file.write_bytes(_placed(places))
        try:
            assert len(read_header(file).tensors) == len(places)
        except UnsupportedModel:
            assert len(taken) > len(set(taken)), places
            assert "overlap" in refusal(file)
        else:
            assert len(taken) == len(set(taken)), places
        outcomes.append(len(taken) == len(set(taken)))
    assert 20 < sum(outcomes) < 180


def test_the_lists_of_a_header_are_bounded_together(tmp_path: Path) -> None:
    """100 MB of numbers of 8 bytes took 733 MiB."""
    one = (3 << 20, string(b"a") + struct.pack("<IIQ", 9, 0, 3 << 20) + bytes(3 << 20))
    other = (2 << 20, string(b"b") + struct.pack("<IIQ", 9, 0, 2 << 20) + bytes(2 << 20))
    file = tmp_path / "lists.gguf"
    file.write_bytes(header(values=2, rest=one[1] + other[1]))
    assert f"claim to have {one[0] + other[0]} items" in refusal(file)
    file.write_bytes(header(values=1, rest=one[1]))
    assert len(read_header(file).metadata["a"]) == one[0]


def test_what_is_not_a_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    assert not is_gguf(fifo)
    assert "cannot be read" in refusal(fifo)
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "nothing.gguf")


def split(tmp_path: Path, count: int = 3) -> list[Path]:
    """A model split into files, of which the first has no tensors."""
    files = []
    for number in range(count):
        file = tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf"
        metadata = {"general.alignment": 32, "split.count": count, "split.no": number}
        tensors = {f"t{number}.weight": np.full((1, 32), number, np.float32)} if number else {}
        files.append(write_gguf(file, "llama", metadata, tensors))
    return files


def test_a_split_model_is_read_whole_whichever_file_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    headers = [read_header(file) for file in files]
    assert len({header.digest for header in headers}) == 1
    for header in headers:
        assert {name: tensor.file for name, tensor in header.tensors.items()} == {
            "t1.weight": files[1],
            "t2.weight": files[2],
        }
        assert header.metadata["split.no"] == 0


def test_a_split_model_without_all_its_files_is_refused(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].unlink()
    assert "1 of the model's 3 files are not in" in refusal(files[0])
    files[2].rename(tmp_path / "other.gguf")
    assert "is one of 3 files of a model, and its name does not end in" in refusal(
        tmp_path / "other.gguf"
    )


def test_files_that_are_not_of_one_model_are_refused(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[2].write_bytes(files[1].read_bytes())
    assert "Two of the model's files have a tensor t1.weight" in refusal(files[0])
