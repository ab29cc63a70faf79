"""Reading what may be anything, and writing what only its owner reads."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.system.files import (
    MAX_TEXT,
    check_model_files,
    make_own_folder,
    open_regular,
    own_json,
    read_file,
    read_json,
    replace_file,
    write_new,
)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


KINDS = (fifo, device, unix_socket, folder, loop)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A name that is short enough for a socket."""
    monkeypatch.chdir(tmp_path)
    return Path("file")


# ---- reading


@pytest.mark.parametrize("make", KINDS)
def test_what_is_not_a_regular_file_is_refused_at_once(
    make: Callable[[Path], None], short: Path
) -> None:
    make(short)
    with pytest.raises(OSError, match="file"):
        read_file(short, 1000)


def test_a_link_to_a_regular_file_is_followed_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    link = tmp_path / "link"
    link.symlink_to("blob")
    assert read_file(link, 7) == b"content"
    with pytest.raises(OSError, match="link"):
        open_regular(link, follows=False)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # sparse; it would not fit into the memory
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_file(file, 1000)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_json_that_is_deeper_than_the_stack_is_a_value_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(file, 1 << 20)
    with pytest.raises(ValueError, match="nested too deeply"):
        own_json(content.encode())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e300", "NaN", "Infinity", "9" * 19])
def test_a_number_that_no_integer_of_64_bits_can_be_is_refused_in_our_files_alone(
    tmp_path: Path, number: str
) -> None:
    content = f'{{"bytes": {number}}}'
    with pytest.raises(ValueError, match="number"):
        own_json(content.encode())
    file = tmp_path / "config.json"
    file.write_text(content)
    assert "bytes" in read_json(file, 1000)  # published configurations have such


def test_numbers_of_our_files_are_read() -> None:
    assert own_json(b'{"a": -12, "b": 1700000000.25}') == {"a": -12, "b": 1700000000.25}


def test_what_is_not_an_object_is_not_ours() -> None:
    for content in [b"", b"[]", b"1", b"\xff", b"{", b"\xef\xbb\xbf{}"]:
        with pytest.raises(ValueError):
            own_json(content)


# ---- a model's folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "x"])
@pytest.mark.parametrize("make", [fifo, device, unix_socket])
def test_a_folder_with_a_file_that_a_loader_would_wait_for_is_refused(
    make: Callable[[Path], None], name: str, short: Path
) -> None:
    make(Path(name))
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        check_model_files(Path())


def test_templates_in_their_subfolder_are_looked_at_as_well(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates" / "rag.jinja")
    with pytest.raises(ValueError, match=r"rag\.jinja is not a regular file"):
        check_model_files(tmp_path)


def test_texts_have_a_bound_and_weights_do_not(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MAX_TEXT + 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json has"):
        check_model_files(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    check_model_files(tmp_path)


def test_a_folder_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"{}")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to("../blob")
    (snapshot / "gone.json").symlink_to("../nothing")
    (snapshot / ".git").mkdir()
    check_model_files(snapshot)


# ---- writing


def test_a_folder_and_those_above_it_are_for_their_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for _ in range(2):
        make_own_folder(tmp_path / "a" / "b" / "c")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("", "a", "a/b", "a/b/c")] == [
        0o755, 0o700, 0o700, 0o700,
    ]  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        make_own_folder(tmp_path / "file")


@pytest.mark.parametrize("to", ["elsewhere", "nothing"])
def test_a_link_under_the_name_of_a_new_file_is_replaced_and_not_followed(
    tmp_path: Path, to: str
) -> None:
    other = tmp_path / "elsewhere"
    other.write_text("of somebody else")
    file = tmp_path / "file"
    file.symlink_to(to)
    write_new(file, b"ours, ", b"in two")
    assert other.read_text() == "of somebody else"
    assert not (tmp_path / "nothing").exists()
    assert not file.is_symlink()
    assert file.read_bytes() == b"ours, in two"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_program_under_that_name_keeps_its_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("open elsewhere")
    with file.open() as opened:
        write_new(file, b"ours")
        assert opened.read() == "open elsewhere"


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    replace_file(file, b"first")
    replace_file(file, b"second", is_synced=True)
    assert file.read_bytes() == b"second"

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        replace_file(file, b"the third")
    assert file.read_bytes() == b"second"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_shorter_text_replaces_a_file_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    file = tmp_path / "file"
    replace_file(file, b"one, two")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlxserve.system.files.write_new", refuse)
    replace_file(file, b"two", is_synced=is_synced)
    assert file.read_bytes() == b"two"
    other = tmp_path / "other"
    for name, make in (("link", other.symlink_to), ("hard link", other.hardlink_to)):
        make(file)
        with pytest.raises(OSError, match="No space"):
            replace_file(other, b"x")
        assert file.read_bytes() == b"two", name
        other.unlink()
    with pytest.raises(OSError, match="No space"):
        replace_file(other, b"x")
