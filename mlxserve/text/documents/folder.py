"""Reads a folder as one document: the tree of its files, and their texts.

What .gitignore files leave out is left out, and so are hidden files, links and binary files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlxserve.core.errors import InvalidRequest
from mlxserve.system.counted import counted
from mlxserve.system.extras import extra_command
from mlxserve.text.documents.document import FOLDER_END, PAGE_END, Document
from mlxserve.text.documents.plain_text import decode_text

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_TOKENS = 1_000_000  # of all files together
_CHARACTERS_PER_TOKEN = 4
MAX_FILE = 256 << 10  # bytes of a text; data and lock files are larger
_MAX_LISTED = 2_000  # files in the tree
_MAX_WALKED = 100_000  # files and folders
_IGNORED = ("node_modules", "__pycache__")
_RULES = ".gitignore"
_READ = (".pdf", ".docx")  # by the reader of documents
_MAX_READ = 64 << 20  # bytes of one of these


def read_folder(
    path: Path, read: Callable[[str, bytes], Document], max_tokens: int = MAX_TOKENS
) -> Document:
    """Read a folder.

    read: reads a document of another kind than text; raises InvalidRequest
    max_tokens: files after these are in the tree alone

    Raises InvalidRequest, whose message ends a sentence about the folder, and OSError.
    """
    left = max_tokens * _CHARACTERS_PER_TOKEN
    tree, texts, num_unread = [], [], 0
    for file in _files(path.resolve()):
        name = file.relative_to(path.resolve()).as_posix()
        text = _text_of(file, read)
        is_read = text is not None and len(text) <= left
        tree.append(f"  {name}{'' if is_read else ' (not read)'}")
        if text is None or not is_read:
            num_unread += 1
            continue
        left -= len(text)
        pages = text.replace(PAGE_END, "\n")
        texts.append(f"{name}:\n{pages}")
    if not texts:
        raise InvalidRequest("has no text files")
    name = f"{path.resolve().name or path}{FOLDER_END}"
    unread = f", of which {num_unread:,} are no text or too large" if num_unread else ""
    heading = f"{name} has {counted(len(tree), 'file')}{unread}:"
    listed = "\n".join([heading, *tree[:_MAX_LISTED], *(["  ..."] if tree[_MAX_LISTED:] else [])])
    return Document(name, PAGE_END.join([listed, *texts]))


def _text_of(file: Path, read: Callable[[str, bytes], Document]) -> str | None:
    """A file's text; None for one that is binary, too large or cannot be read."""
    is_document = file.suffix.lower() in _READ
    try:
        if file.stat().st_size > (_MAX_READ if is_document else MAX_FILE):
            return None
        data = file.read_bytes()
        text = read(file.name, data).text if is_document else decode_text(data)
    except (OSError, ValueError, InvalidRequest):
        return None
    return text if text.strip() else None


def _files(folder: Path) -> Iterator[Path]:
    """Yield files that are not ignored, those of a folder before its folders."""
    num_left = _MAX_WALKED
    waiting = [(folder, _rules_above(folder))]
    while waiting:
        here, rules = waiting.pop()
        rules = [*rules, *_rules_of(here)]
        folders = []
        for entry in sorted(os.scandir(here), key=lambda each: each.name):
            num_left -= 1
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") or entry.name in _IGNORED or entry.is_symlink():
                continue
            if _is_ignored(Path(entry.path), is_folder, rules):
                continue
            if is_folder:
                folders.append((Path(entry.path), rules))
            elif entry.is_file():
                yield Path(entry.path)
        if num_left < 0:
            raise InvalidRequest(f"has more than {_MAX_WALKED:,} files; give a folder within it")
        waiting += reversed(folders)


Rules = list[tuple[Path, "GitIgnoreSpec"]]


def _rules_above(folder: Path) -> Rules:
    """The rules of the repository that the folder is in."""
    if (folder / ".git").exists():
        return []
    above: Rules = []
    for parent in folder.parents:
        above = [*_rules_of(parent), *above]
        if (parent / ".git").exists():
            return above
    return []


def _rules_of(folder: Path) -> Rules:
    file = folder / _RULES
    if not file.is_file():
        return []
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise InvalidRequest(
            f"has a .gitignore file, which needs pathspec: {extra_command('documents')}"
        ) from error
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [(folder, GitIgnoreSpec.from_lines(lines))]


def _is_ignored(path: Path, is_folder: bool, rules: Rules) -> bool:
    """Decide as git does: the deepest file with a matching rule decides, by its last one."""
    for folder, spec in reversed(rules):
        name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        if (decided := spec.check_file(name).include) is not None:
            return decided
    return False
