"""Passes on what a tool server writes, within bounds: the program of a process of its own.

    client of mcp ◀── stdout ── relay ◀── stdout ── server ◀── stdin, of the client

The client of `mcp` takes the square of a line's length to read it, and as many messages as there
are. Here a line costs its length, and a server that writes too fast waits. Standard library only: it
is run as a file, without our packages.
"""

import os
import select
import subprocess
import sys
import time

MAX_LINE = 8 << 20  # bytes
MAX_LINES, MAX_BYTES = 1_000, 64 << 20  # in a second
_CHUNK = 1 << 16  # bytes
_TICK = 0.1  # seconds between two looks whether a silent server has ended


class TooLong(Exception):
    """A line is longer than MAX_LINE."""


class Flow:
    """Counts what passes, and waits where it is too much for a second."""

    def __init__(self) -> None:
        self._line = 0  # bytes of the line under way
        self._began = time.monotonic()
        self._num_lines = self._num_bytes = 0  # since then

    def pieces(self, data: bytes) -> "list[bytes]":
        """Split data into parts of at most MAX_LINES lines. Raises TooLong."""
        parts, start = [], 0
        lines = data.split(b"\n")
        for number in range(0, len(lines), MAX_LINES):
            size = sum(map(len, lines[number : number + MAX_LINES])) + MAX_LINES
            parts.append(data[start : start + size])
            start += size
        for line in lines[:-1]:
            self._check(self._line + len(line))
            self._line = 0
        self._line += len(lines[-1])
        self._check(self._line)
        return [part for part in parts if part]

    def wait(self, part: bytes) -> None:
        """Wait until the part may pass."""
        self._num_lines += part.count(b"\n")
        self._num_bytes += len(part)
        seconds = max(self._num_lines / MAX_LINES, self._num_bytes / MAX_BYTES)
        passed = time.monotonic() - self._began
        if seconds > max(passed, 1.0):
            time.sleep(seconds - passed)
        if passed > seconds + 1.0:
            self._began, self._num_lines, self._num_bytes = time.monotonic(), 0, 0

    @staticmethod
    def _check(size: int) -> None:
        if size > MAX_LINE:
            raise TooLong(
                f"The server was ended: it sent a line of more than {MAX_LINE >> 20} MiB."
            )


def pass_on(server: "subprocess.Popen[bytes]", to: int) -> None:
    """Pass on a server's output until it has ended. Raises TooLong, and OSError once nobody reads."""
    assert server.stdout is not None
    source, flow = server.stdout.fileno(), Flow()
    while True:
        # What a child of the server keeps open has no end.
        has_ended = server.poll() is not None
        if not select.select([source], [], [], 0 if has_ended else _TICK)[0]:
            if has_ended:
                return
            continue
        data = os.read(source, _CHUNK)
        if not data:
            return
        for part in flow.pieces(data):
            flow.wait(part)
            while part:
                part = part[os.write(to, part) :]


def main(command: "list[str]") -> int:
    """Run a server and return its exit code."""
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error}\n")
        return 127
    try:
        pass_on(server, sys.stdout.fileno())
    except TooLong as error:
        sys.stderr.write(f"{error}\n")
        server.kill()
    except OSError:
        # The client has gone, and ends this process group.
        server.kill()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
