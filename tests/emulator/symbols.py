"""From an address in a kernel's library to a line of the Metal text.

On Linux the line tables are read here (DWARF 4, which is what toolchain.py asks for), because the
pip-only compiler comes with no symbolizer. macOS leaves them in the object files, and `atos`, which
comes with Apple's clang, reads those.
"""

import bisect
import functools
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.emulator.faults import SourceLine


class LineRow(NamedTuple):
    address: int
    place: SourceLine | None  # None: the end of a sequence, or code without a line


def locate(library: Path, address: int) -> SourceLine | None:
    """The place of the instruction at `address`, counted from the library's start."""
    if sys.platform == "darwin":
        return _ask_atos(library, address)
    rows = _line_rows(library)
    k = bisect.bisect_right(rows, address, key=lambda row: row.address) - 1
    return rows[k].place if k >= 0 else None


def _ask_atos(library: Path, address: int) -> SourceLine | None:
    atos = shutil.which("atos")
    if atos is None:
        return None
    command = [atos, "-o", str(library), "-offset", hex(address)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    _, _, place = output.strip().rstrip(")").rpartition("(")
    file, _, line = place.rpartition(":")
    return SourceLine(file, int(line)) if line.isdigit() else None


@functools.lru_cache(maxsize=64)
def _line_rows(library: Path) -> tuple[LineRow, ...]:
    section = _section(library.read_bytes(), b".debug_line")
    rows = [row for program in _programs(section) for row in program.rows()]
    # Of two rows at one address the later one holds; a sequence's end yields to a start.
    latest = {row.address: row for row in sorted(rows, key=lambda r: r.place is not None)}
    return tuple(latest[address] for address in sorted(latest))


def _section(elf: bytes, name: bytes) -> bytes:
    """The content of a section of a 64-bit little-endian ELF file; empty if there is none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)

    def header(k: int) -> tuple[int, int, int]:
        at = table + k * size
        (name_at,) = struct.unpack_from("<I", elf, at)
        offset, length = struct.unpack_from("<QQ", elf, at + 24)
        return name_at, offset, length

    _, strings, _ = header(names)
    for k in range(count):
        name_at, offset, length = header(k)
        start = strings + name_at
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[offset : offset + length]
    return b""


def _programs(section: bytes) -> Iterator["LineProgram"]:
    at = 0
    while at < len(section):
        (length,) = struct.unpack_from("<I", section, at)
        yield LineProgram(section[at + 4 : at + 4 + length])
        at += 4 + length


class ByteReader:
    """A position in some bytes."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, format_: str) -> int:
        (value,) = struct.unpack_from(f"<{format_}", self.data, self.at)
        self.at += struct.calcsize(f"<{format_}")
        return int(value)

    def unsigned(self) -> int:
        """A LEB128 number."""
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def signed(self) -> int:
        start = self.at
        value = self.unsigned()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if self.data[self.at - 1] & 0x40 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


class LineProgram:
    """The line number program of one compilation unit (DWARF 4, section 6.2)."""

    def __init__(self, unit: bytes) -> None:
        read = ByteReader(unit)
        self._is_known = read.take("H") == 4
        if not self._is_known:  # not ours: a library's own debug information
            return
        self._end_of_header = read.take("I") + read.at
        self._least_advance, _, _ = read.take("B"), read.take("B"), read.take("B")
        self._line_base, self._line_range = read.take("b"), read.take("B")
        self._first_special = read.take("B")
        self._operands = [0, *(read.take("B") for _ in range(self._first_special - 1))]
        while read.string():  # include directories: our markers carry whole names
            pass
        self._files = [""]
        while name := read.string():
            self._files.append(name)
            read.unsigned(), read.unsigned(), read.unsigned()
        self._read = ByteReader(unit, self._end_of_header)
        self._reset()

    def _reset(self) -> None:
        self._address, self._file, self._line = 0, 1, 1

    def _row(self) -> LineRow:
        place = SourceLine(self._files[self._file], self._line) if self._line else None
        return LineRow(self._address, place)

    def rows(self) -> Iterator[LineRow]:
        if not self._is_known:
            return
        while self._read.at < len(self._read.data):
            opcode = self._read.take("B")
            if opcode >= self._first_special:
                yield self._special(opcode)
            elif opcode == 0:
                yield from self._extended()
            elif opcode == 1:  # copy
                yield self._row()
            else:
                self._standard(opcode)

    def _special(self, opcode: int) -> LineRow:
        advance, step = divmod(opcode - self._first_special, self._line_range)
        self._address += advance * self._least_advance
        self._line += self._line_base + step
        return self._row()

    def _extended(self) -> Iterator[LineRow]:
        length = self._read.unsigned()
        end = self._read.at + length
        opcode = self._read.take("B")
        if opcode == 1:  # end of sequence
            yield LineRow(self._address, None)
            self._reset()
        elif opcode == 2:  # set address
            self._address = self._read.take("Q")
        self._read.at = end

    def _standard(self, opcode: int) -> None:
        read = self._read
        if opcode == 2:  # advance address
            self._address += read.unsigned() * self._least_advance
        elif opcode == 3:
            self._line += read.signed()
        elif opcode == 4:
            self._file = read.unsigned()
        elif opcode == 8:  # advance the address as the last special opcode would
            advance = (255 - self._first_special) // self._line_range
            self._address += advance * self._least_advance
        elif opcode == 9:
            self._address += read.take("H")
        else:
            for _ in range(self._operands[opcode]):
                read.unsigned()
