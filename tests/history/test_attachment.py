import os
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from mlxserve.history.attachment import MAX_SIZE, AttachmentRefused, as_markdown


def test_a_file_becomes_a_code_block_under_its_name(tmp_path: Path) -> None:
    file = tmp_path / "sum.py"
    file.write_text("1 + 1\n\n")
    assert as_markdown(file) == "sum.py:\n```py\n1 + 1\n```\n"


@pytest.mark.parametrize("text", ["```\ninner\n```\n", "a ````` b", "~~~\n", ""])
def test_no_contents_close_the_code_block(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.md"
    file.write_text(text)
    tokens = MarkdownIt().parse(as_markdown(file) + "\nafter")
    fences = [token.content for token in tokens if token.type == "fence"]
    assert [content.strip() for content in fences] == [text.strip()]


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(b"\x89PNG\xff")
    with pytest.raises(AttachmentRefused, match="not a UTF-8 text file"):
        as_markdown(file)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "big.txt"
    file.write_bytes(b"a" * (MAX_SIZE + 1))
    with pytest.raises(AttachmentRefused, match="larger than 256 KiB"):
        as_markdown(file)


def test_anything_but_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "missing", "pipe", "\x00"):
        with pytest.raises(AttachmentRefused):
            as_markdown(tmp_path / name)
