"""Document: the text of a file, in pages or parts, identified by its content."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from mlxserve.system.counted import counted

NOT_ALL_READ = "were read: the rest does not fit the context"  # of a note about a document
PAGE_END = "\f"  # between pages, as pdftotext writes it
FOLDER_END = "/"  # of the name of a folder, whose parts are files
_PART_SIZE = 2_000  # characters of a part of a text without pages, at least
_ID_SIZE = 5  # bytes


@dataclass(frozen=True)
class Document:
    """The text of a file or folder.

    name: of the file, for people
    text: pages have `PAGE_END` between them
    """

    name: str
    text: str

    @cached_property
    def id(self) -> str:
        """A hash of the text: the same file under another name has the same id."""
        return blake2b(self.text.encode(errors="replace"), digest_size=_ID_SIZE).hexdigest()

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Pages; files of a folder; else paragraphs of about `_PART_SIZE` characters together."""
        if PAGE_END in self.text:
            return tuple(self.text.split(PAGE_END))
        return tuple(_paragraphs(self.text))

    @property
    def is_folder(self) -> bool:
        """True for a folder, whose first part is the tree of its files."""
        return self.name.endswith(FOLDER_END) and PAGE_END in self.text

    @property
    def unit(self) -> str:
        """Name the parts: pages, files or parts."""
        if self.is_folder:
            return "file"
        return "page" if PAGE_END in self.text else "part"

    @property
    def num_units(self) -> int:
        return len(self.parts) - self.is_folder

    @property
    def size_label(self) -> str:
        """The number of its pages, files or characters."""
        if self.unit == "part":
            return counted(len(self.text), "character")
        return counted(self.num_units, self.unit)


def _paragraphs(text: str) -> list[str]:
    """Cut a text after lines, into parts that give it again when joined."""
    parts, begin = [], 0
    while len(text) - begin > 2 * _PART_SIZE:
        end = _end_of_part(text, begin + _PART_SIZE)
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def _end_of_part(text: str, at: int) -> int:
    """The first place after an empty line, a line or a character, not far from `at`."""
    for mark in ("\n\n", "\n", " "):
        if (found := text.find(mark, at, at + _PART_SIZE)) >= 0:
            return found + len(mark)
    return at + _PART_SIZE
