"""What a tool server writes is passed on, and a flood of it is bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlxserve.mcp import relay
from mlxserve.mcp.relay import MAX_LINE, MAX_LINES, Flow, TooLong


def relayed(source: str, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-S", relay.__file__, sys.executable, "-c", source]
    return subprocess.run(command, input=sent, capture_output=True, timeout=60, check=False)


def test_lines_pass_both_ways_and_the_exit_code_is_the_servers() -> None:
    done = relayed(
        "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\nsys.exit(7)",
        b"one\ntwo\n",
    )
    assert (done.stdout, done.returncode) == (b"ONE\nTWO\n", 7)


def test_what_a_child_keeps_open_does_not_keep_the_relay() -> None:
    done = relayed(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)"
        "\nprint('done')"
    )
    assert done.stdout == b"done\n"


def test_an_endless_line_ends_the_server() -> None:
    done = relayed("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert b"it sent a line of more than 8 MiB" in done.stderr
    assert len(done.stdout) <= MAX_LINE
    assert done.returncode != 0


def test_a_command_that_cannot_be_started_is_said() -> None:
    command = [sys.executable, "-I", "-S", relay.__file__, "/no/such/command"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, b"/no/such/command cannot be started" in done.stderr) == (127, True)


@pytest.mark.parametrize("unit", [b"\n", b"{}\n", b"x", b"xx\nx", b"\n\n\n" + b"y" * 700])
def test_all_bytes_pass_in_their_order_and_few_lines_at_once(unit: bytes) -> None:
    data = unit * (200_000 // len(unit))
    parts = [
        part
        for start in range(0, len(data), 65_536)
        for part in Flow().pieces(data[start : start + 65_536])
    ]
    assert b"".join(parts) == data
    assert max(part.count(b"\n") for part in parts) <= MAX_LINES


def test_a_line_is_counted_over_all_its_parts() -> None:
    flow, part = Flow(), b"x" * (1 << 20)
    for _ in range(8):
        flow.pieces(part)
    with pytest.raises(TooLong):
        flow.pieces(b"x")
    flow = Flow()
    for _ in range(20):
        flow.pieces(part + b"\n")


def test_more_lines_than_a_second_may_have_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(relay.time, "monotonic", lambda: now)
    monkeypatch.setattr(relay.time, "sleep", sleep)
    flow = Flow()
    for _ in range(10):
        flow.wait(b"{}\n" * MAX_LINES)
    assert now == pytest.approx(10, abs=1.1)
    slept.clear()
    now += 100
    flow.wait(b"{}\n")
    flow.wait(b"{}\n" * MAX_LINES)
    assert not slept
