"""What a document may do to the process that reads it."""

from __future__ import annotations


class EndlessReading:
    def read(self, _name: str, _data: bytes) -> str:
        while True:
            pass


class HungryReading:
    def read(self, _name: str, _data: bytes) -> str:
        return str(bytearray(1 << 30)[:1])
