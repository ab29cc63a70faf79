"""What the tests run in a helper process."""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any


class Worker:
    """Jobs that end well, and jobs that do not."""

    def __init__(self, name: str = "", num_reserved: int = 0) -> None:
        """num_reserved: bytes of address space that is not used at first"""
        self.name = name
        self._reserved = mmap.mmap(-1, num_reserved) if num_reserved else None
        self._kept: list[bytes] = []

    def echo(self, value: Any) -> Any:
        return value

    def whoami(self) -> tuple[str, int]:
        return self.name, os.getpid()

    def loaded(self) -> list[str]:
        return sorted(sys.modules)

    def die_at_first(self, marks: str, times: int) -> int:
        """Is killed in its first `times` calls, of which the file knows. Returns how many there were."""
        with open(marks, "a+b") as file:
            if file.tell() < times:
                file.write(b".")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return file.tell()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def session(self) -> list[int]:
        return [os.getsid(0), os.getpgid(0), os.getpid()]

    def loop(self) -> None:
        """Holds the GIL, in C, for years."""
        re.match(r"(a*)*b", "a" * 60)

    def count(self, num_values: int, then: str = "") -> Iterator[int]:
        yield from range(num_values)
        if then:
            getattr(self, then)()

    def sleepy(self, num_values: int, seconds: float) -> Iterator[int]:
        for value in range(num_values):
            time.sleep(seconds)
            yield value

    def eat(self, num_bytes: int) -> int:
        """Touches every page of what it takes, and keeps it."""
        while num_bytes > 0:
            self._kept.append(b"x" * (8 << 20))
            num_bytes -= 8 << 20
        return len(self._kept)

    def use_reserved(self) -> None:
        assert self._reserved is not None
        self._reserved.write(bytes(len(self._reserved)))
        time.sleep(3600)

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def end(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def object(self) -> object:
        return object()

    def interrupt(self) -> str:
        """SIGINT and SIGTERM, as a terminal or a service manager send them."""
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return "still here"

    def say(self) -> str:
        print("on stdout")
        return sys.stdin.read()
