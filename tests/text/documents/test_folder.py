"""A folder as a document: what git would keep of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxserve.core.errors import InvalidRequest
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.folder import MAX_FILE, read_folder


def read_pdf(name: str, data: bytes) -> Document:
    return Document(name, f"{len(data)} bytes\fof PDF")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    files = {
        ".gitignore": b"build/\n*.log\n!kept.log\n",
        ".env": b"SECRET=1",
        "b.md": "café".encode("latin-1"),
        "a.bin": b"\0\1\2",
        "x.log": b"log",
        "kept.log": b"kept",
        "build/out.txt": b"out",
        "src/.gitignore": b"*.tmp\n",
        "src/a.py": b"x = 1\n",
        "src/b.tmp": b"tmp",
        "src/c.pdf": b"%PDF",
        "src/large.json": b"1" * (MAX_FILE + 1),
        "node_modules/m/index.js": b"x",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "link.md").symlink_to(folder / ".env")
    return folder


def test_a_folder_is_a_tree_and_the_files_that_are_not_ignored(folder: Path) -> None:
    document = read_folder(folder, read_pdf)
    assert document.name == "notes/"
    tree, *files = document.parts
    assert tree.splitlines() == [
        "notes/ has 6 files, of which 2 are no text or too large:",
        "  a.bin (not read)",
        "  b.md",
        "  kept.log",
        "  src/a.py",
        "  src/c.pdf",
        "  src/large.json (not read)",
    ]
    assert files == [
        "b.md:\ncafé",
        "kept.log:\nkept",
        "src/a.py:\nx = 1\n",
        "src/c.pdf:\n4 bytes\nof PDF",
    ]
    assert document.size_label == "4 files"


def test_rules_of_the_repository_around_a_folder_hold_in_it(folder: Path) -> None:
    (folder.parent / ".git").mkdir()
    (folder.parent / ".gitignore").write_text("*.py\n")
    assert "a.py" not in read_folder(folder, read_pdf).text


def test_files_beyond_the_budget_are_in_the_tree_alone(folder: Path) -> None:
    document = read_folder(folder, read_pdf, max_tokens=2)
    assert document.size_label == "2 files"
    assert "  src/a.py (not read)" in document.parts[0]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(InvalidRequest, match="has no text files"):
        read_folder(tmp_path, read_pdf)
