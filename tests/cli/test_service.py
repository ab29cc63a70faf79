"""`mlxserve service` with a systemctl and a launchctl that record what they are told."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.doctor import report
from mlxserve.service import launchd, systemd
from mlxserve.service.unit import ServiceUnit, last_lines
from tests.cli.commands import Run, error_line

# Appends its arguments to a file, and fails or prints as files beside it say.
_FAKE = """#!/bin/sh
here=$(dirname "$0")
echo "$(basename "$0") $*" >> "$here/calls"
for word in "$@"; do
  [ -f "$here/say-$word" ] && cat "$here/say-$word"
  if [ -f "$here/fail-$word" ]; then
    cat "$here/fail-$word" >&2
    exit 5
  fi
done
exit 0
"""
_STRANGE = ServiceUnit(
    command=("/opt/my python/bin/python", "-m", "mlxserve", "--alias", 'a "b" $c %d \\e'),
    environment={"MLXSERVE_HOME": "/Users/me/my files/100%"},
    log=Path("/home/me/log files/100%.log"),
    stop_seconds=20,
)


class Fake:
    """A program on the PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in ("systemctl", "launchctl"):
            (folder / name).write_text(_FAKE)
            (folder / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        file = self._folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def say(self, word: str, text: str) -> None:
        (self._folder / f"say-{word}").write_text(text)

    def fail(self, word: str, text: str) -> None:
        (self._folder / f"fail-{word}").write_text(text)

    def work(self, word: str) -> None:
        (self._folder / f"fail-{word}").unlink()

    def forget(self) -> None:
        (self._folder / "calls").unlink(missing_ok=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "my home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("MLXSERVE_", "XDG_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def fake(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Fake(folder)


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    return home / ".config" / "systemd" / "user" / "mlxserve.service"


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "darwin")
    return home / "Library" / "LaunchAgents" / "org.mlxserve.server.plist"


def test_systemd_starts_serve_with_the_options_and_restarts_it_only_after_a_failure(
    run: Run, fake: Fake, linux: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret-secret-secret")
    monkeypatch.setenv("MLXSERVE_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("HF_HOME", "/models/of mine")
    monkeypatch.chdir(home)
    (home / "a.toml").write_text("port = 8123\n")
    code, out, err = run(
        "service", "install", "--config", "a.toml", "--alias", "a b", "--disk-cache-dir", "pages",
        "--no-enable-prefix-caching", "--drain-seconds", "30",
    )  # fmt: skip
    assert (code, str(linux) in out, str(home / ".local/state/mlxserve/service.log") in out) == (
        0,
        True,
        True,
    )
    assert "MLXSERVE_API_KEY, MLXSERVE_MAX_NUM_SEQS" in err
    lines = linux.read_text().splitlines()
    [start] = (line for line in lines if line.startswith("ExecStart="))
    assert start.startswith(f"ExecStart={sys.executable} -m mlxserve serve --config ")
    assert f'"{home}/a.toml"' in start
    assert f'--disk-cache-dir "{home}/pages"' in start
    assert '--alias "a b"' in start
    assert "--no-enable-prefix-caching" in start
    assert "Restart=on-failure" in lines
    assert "TimeoutStopSec=45" in lines
    assert 'Environment="HF_HOME=/models/of mine"' in lines
    assert "WantedBy=default.target" in lines
    assert "secret" not in linux.read_text()
    assert (home / ".local/state/mlxserve").is_dir()
    assert fake.calls == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user enable mlxserve.service",
        "systemctl --user restart mlxserve.service",
    ]


def test_launchd_starts_serve_at_login_and_restarts_it_only_after_a_failure(
    run: Run, fake: Fake, mac: Path, home: Path
) -> None:
    fake.fail("bootout", "Boot-out failed: 3: No such process")
    assert run("service", "install", "--port", "8123").code == 0
    agent = plistlib.loads(mac.read_bytes())
    assert agent["ProgramArguments"] == [
        *(sys.executable, "-m", "mlxserve", "serve"),
        *("--port", "8123"),
    ]
    assert agent["RunAtLoad"] is True
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] == 20
    log = str(home / "Library/Logs/mlxserve/service.log")
    assert (agent["StandardOutPath"], agent["StandardErrorPath"]) == (log, log)
    session = f"gui/{os.getuid()}"
    assert fake.calls == [
        f"launchctl print {session}",
        f"launchctl bootout {session}/org.mlxserve.server",
        f"launchctl enable {session}/org.mlxserve.server",
        f"launchctl bootstrap {session} {mac}",
    ]


@pytest.mark.parametrize("system", ["linux", "mac"])
def test_installing_again_replaces_the_unit_and_uninstalling_twice_is_no_error(
    run: Run, fake: Fake, system: str, request: pytest.FixtureRequest
) -> None:
    unit: Path = request.getfixturevalue(system)
    assert run("service", "install", "--port", "1111").code == 0
    first = unit.read_bytes()
    assert run("service", "install", "--port", "2222").code == 0
    assert b"1111" in first
    assert b"1111" not in unit.read_bytes()
    assert b"2222" in unit.read_bytes()
    assert run("service", "uninstall").code == 0
    assert list(unit.parent.iterdir()) == []
    stopped = [call for call in fake.calls if "disable --now" in call or "bootout" in call]
    assert stopped
    fake.forget()
    assert run("service", "uninstall") == (0, "not installed\n", "")
    assert fake.calls == []
    assert run("service", "status").code == 3


def test_status_tells_the_state_of_systemd_and_the_end_of_the_log(
    run: Run, fake: Fake, linux: Path, home: Path
) -> None:
    run("service", "install")
    (home / ".local/state/mlxserve/service.log").write_text("first\nmlxserve is ready\n")
    fake.say("show", "ActiveState=active\nSubState=running\nMainPID=42\nNRestarts=2\n")
    code, out, _ = run("service", "status")
    assert code == 0
    assert out.splitlines()[0] == "active (running), process 42, restarted 2 times"
    assert out.splitlines()[-1] == "  mlxserve is ready"
    fake.say("show", "ActiveState=failed\nSubState=failed\nMainPID=0\nExecMainStatus=70\n")
    code, out, _ = run("service", "status")
    assert (code, out.splitlines()[0]) == (3, "failed (failed), last exit code 70")


def test_status_tells_the_state_of_launchd(run: Run, fake: Fake, mac: Path) -> None:
    run("service", "install")
    fake.say(
        "print", "x = {\n\tstate = running\n\truns = 3\n\tpid = 42\n\tlast exit code = 70\n}\n"
    )
    code, out, _ = run("service", "status")
    assert code == 0
    assert out.splitlines()[0] == "running, process 42, started 3 times, last exit code 70"
    fake.say(
        "print", "x = {\n\tstate = not running\n\truns = 1\n\tlast exit code = (never exited)\n}"
    )
    code, out, _ = run("service", "status")
    assert (code, out.splitlines()[0]) == (3, "not running")


def test_doctor_shows_the_service_and_the_end_of_its_log(
    run: Run, fake: Fake, linux: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "diagnose", lambda: iter(()))
    assert "service" not in run("doctor").out
    run("service", "install")
    log = home / ".local/state/mlxserve/service.log"
    log.write_text("mlxserve is ready\n")
    fake.say("show", "ActiveState=active\nSubState=running\nMainPID=42\n")
    lines = [line.split(maxsplit=1) for line in run("doctor").out.splitlines()]
    assert lines[-3] == ["service", "active (running), process 42"]
    assert lines[-2] == ["service", f"log     {log}"]
    assert " ".join(lines[-1]) == "mlxserve is ready"


@pytest.mark.parametrize(
    ("system", "word", "said", "advice"),
    [
        ("linux", "show-environment", "Failed to connect to bus", "loginctl enable-linger"),
        ("mac", "print", "Domain does not support specified action", "on its screen"),
    ],
)
def test_without_a_session_nothing_is_written(
    run: Run,
    fake: Fake,
    system: str,
    word: str,
    said: str,
    advice: str,
    request: pytest.FixtureRequest,
) -> None:
    unit: Path = request.getfixturevalue(system)
    fake.fail(word, said)
    error = error_line(run("service", "install"))
    assert said in error
    assert advice in error
    assert not unit.exists()


@pytest.mark.parametrize(("system", "name"), [("linux", "systemctl"), ("mac", "launchctl")])
def test_without_its_program_nothing_is_written(
    run: Run,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    unit: Path = request.getfixturevalue(system)
    monkeypatch.setenv("PATH", str(home))
    assert f"There is no `{name}` on this machine" in error_line(run("service", "install"))
    assert not unit.exists()


def test_a_refusal_of_the_manager_is_one_line(run: Run, fake: Fake, linux: Path) -> None:
    fake.fail("enable", "Unit is masked.\n")
    assert "enable mlxserve.service` failed: Unit is masked" in error_line(
        run("service", "install")
    )


def test_what_serve_would_refuse_is_refused_at_once(
    run: Run, fake: Fake, linux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSERVE_API_KEY", "secret-secret-secret")  # which the service has not
    error = error_line(run("service", "install", "--host", "0.0.0.0"))
    assert "mlxserve key create" in error
    assert "port must be" in error_line(run("service", "install", "--port", "70000"))
    assert fake.calls == []
    assert not linux.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_a_unit_with_spaces_quotes_and_percents(tmp_path: Path) -> None:
    file = tmp_path / "mlxserve.service"
    unit = ServiceUnit(
        command=(sys.executable, *_STRANGE.command[1:]),
        environment=_STRANGE.environment,
        log=_STRANGE.log,
        stop_seconds=20,
    )
    file.write_text(systemd.unit_text(unit))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert "mlxserve.service:" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("make", "command", "environment", "log"),
    [
        (
            systemd.unit_text,
            r'ExecStart="/opt/my python/bin/python" -m mlxserve --alias "a \"b\" $$c %%d \\e"',
            'Environment="MLXSERVE_HOME=/Users/me/my files/100%%"',
            "StandardOutput=append:/home/me/log files/100%%.log",
        ),
    ],
)
def test_a_unit_quotes_what_systemd_would_read_differently(
    make: Callable[[ServiceUnit], str], command: str, environment: str, log: str
) -> None:
    lines = make(_STRANGE).splitlines()
    assert {command, environment, log} <= set(lines)


_LINE_ENDS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\x1b")


@pytest.mark.parametrize("end", _LINE_ENDS)
@pytest.mark.parametrize("place", ["command", "name", "value", "log"])
def test_no_text_of_a_unit_ends_its_line(end: str, place: str) -> None:
    """A folder's name would be a directive that systemd runs."""
    text = f"/tmp/x{end}ExecStartPre=/bin/touch /tmp/pwned"
    unit = ServiceUnit(
        command=("python", text) if place == "command" else ("python",),
        environment={"name": {text: "x"}, "value": {"HOME": text}}.get(place, {}),
        log=Path(text if place == "log" else "/tmp/log"),
        stop_seconds=20,
    )
    for make in (systemd.unit_text, launchd.plist_of):
        with pytest.raises(InvalidConfig, match="cannot be part of a service"):
            make(unit)


@pytest.mark.parametrize(
    "text", ["[Unit]", "a b", "'", '"', "%n", "$HOME", "\\n", "#", ";", "ä", "=", "-x"]
)
def test_a_text_of_a_unit_stays_one_word_on_its_line(text: str) -> None:
    usual = ServiceUnit(("python", "x"), {}, Path("/tmp/log"), 20)
    unit = ServiceUnit(("python", text), {}, Path("/tmp/log"), 20)
    lines, expected = systemd.unit_text(unit).splitlines(), systemd.unit_text(usual).splitlines()
    changed = [line for line, other in zip(lines, expected, strict=True) if line != other]
    assert len(changed) == 1
    assert changed[0].startswith("ExecStart=python ")


def test_a_property_list_keeps_every_character() -> None:
    agent = plistlib.loads(launchd.plist_of(_STRANGE))
    assert agent["ProgramArguments"] == list(_STRANGE.command)
    assert agent["EnvironmentVariables"] == _STRANGE.environment
    assert agent["StandardErrorPath"] == str(_STRANGE.log)


def test_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 3) == []
    log.write_bytes(b"\xff\n" * 100_000 + b"one\ntwo\n")
    assert last_lines(log, 3) == ["\ufffd", "one", "two"]
