import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tui.home import Home
from tui.talk.errors import ChatError
from tui.talk.server_process import ServerProcess, ServerStopped

READY = "print('loading weights'); print('mlxserve is ready at http://127.0.0.1:4567')\n"
UNTIL_PARENT_EXITS = "import sys; sys.stdin.read(); print('the parent is gone', flush=True)\n"
Run = Callable[[str], ServerProcess]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts a script in place of the server."""
    started: list[ServerProcess] = []

    def start(script: str) -> ServerProcess:
        log = Home(tmp_path).new_log("server.log")
        server = ServerProcess([sys.executable, "-c", script], log)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


def test_the_address_is_the_one_that_the_server_prints(run: Run) -> None:
    server = run(READY + UNTIL_PARENT_EXITS)
    assert asyncio.run(server.address()) == "http://127.0.0.1:4567"
    assert server.is_running


def test_its_output_goes_to_the_log(run: Run) -> None:
    native = "import os; os.write(2, b'native \\x1b[31mnoise\\n')\n"
    server = run(native + READY + UNTIL_PARENT_EXITS)
    asyncio.run(server.address())
    assert "native ␛[31mnoise" in server.last_lines(10)


def test_a_server_that_exits_early_reports_its_last_output(run: Run) -> None:
    server = run("import sys; print('no such model: x', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ServerStopped) as caught:
        asyncio.run(server.address())
    for part in ("exited with code 3", "no such model: x", str(server.log), "/model"):
        assert part in str(caught.value)


def test_logged_requests_are_not_part_of_its_last_output(run: Run) -> None:
    server = run(
        "import os, signal\n"
        "print('out of pages')\n"
        "for _ in range(9): print('1 INFO uvicorn.access: GET', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(ServerStopped, match=r"by signal 9(.|\n)*out of pages") as caught:
        asyncio.run(server.address())
    assert "GET" not in str(caught.value)


def test_stop_ends_the_process(run: Run) -> None:
    server = run(READY + UNTIL_PARENT_EXITS)
    asyncio.run(server.address())
    server.stop()
    assert not server.is_running
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.talk.server_process.STOP_SECONDS", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    server = run(stubborn + READY + "while True: time.sleep(1)")
    asyncio.run(server.address())
    server.stop()
    assert not server.is_running


def test_a_missing_program_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    server = ServerProcess([str(tmp_path / "nothing")], Home(tmp_path).new_log("a.log"))
    with pytest.raises(ChatError, match="mlxserve doctor"):
        server.start()
    server.stop()


def test_the_command_has_every_flag_it_needs(tmp_path: Path) -> None:
    server = ServerProcess.for_model("some/model", ["--num-pages", "9"], Home(tmp_path))
    assert server.command == [
        *(sys.executable, "-m", "mlxserve", "serve", "--host", "127.0.0.1", "--port", "0"),
        *("--exit-with-parent", "--model", "some/model", "--num-pages", "9"),
    ]


def test_it_exits_when_its_parent_is_killed(tmp_path: Path, patience: float) -> None:
    script = f"""
import asyncio, sys, time
from pathlib import Path
from tui.talk.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", {READY + UNTIL_PARENT_EXITS!r}], Path(sys.argv[1]))
server.start()
asyncio.run(server.address())
print('up', flush=True)
time.sleep(600)
"""
    log = Home(tmp_path).new_log("a.log")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(log)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        assert "gone" not in log.read_text()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: "the parent is gone" in log.read_text(), patience)
