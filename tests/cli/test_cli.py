import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxserve import cli
from mlxserve.cli import run as run_command
from mlxserve.version import __version__

ROOT = Path(__file__).parents[2]


def mlxserve(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "mlxserve", *args],
        cwd=ROOT,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


def invoke(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Runs the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["mlxserve", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a command run in this process: nothing on stdin, and what it sets up is undone."""
    handlers, level = logging.root.handlers[:], logging.root.level
    on_term = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.delenv("MLXSERVE_API_KEY", raising=False)
    yield
    signal.signal(signal.SIGTERM, on_term)
    logging.root.handlers[:], logging.root.level = handlers, level


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line a failed command says."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# The command itself.


def test_version_prints_the_version():
    result = mlxserve("--version")
    assert (result.returncode, result.stdout) == (0, f"mlxserve {__version__}\n")


def test_help_and_chat_import_neither_mlx_nor_a_server():
    code = (
        "import sys; sys.argv = ['mlxserve', '--help']\n"
        "from mlxserve.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'uvicorn', 'starlette', 'textual'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.endswith("imported: []\n"), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--page-size", "7"], "page_size must be one of"),
        (["serve", "--gpu-memory-utilization", "2"], "gpu_memory_utilization"),
        (["serve", "--model", "./no such folder"], "no such folder"),
        (["serve", "--host", "0.0.0.0"], "mlxserve key create"),
        (["serve", "--port", "65536"], "port must be a whole number from 0 to 65535"),
        (["serve", "--log-level", "x"], "log_level must be one of"),
        (["serve", "--config", "/nonexistent.toml"], "cannot be read"),
        (["serve", "--host", "203.0.113.7", "--api-key-file", "/nonexistent"], "cannot be read"),
        (["serve", "--allowed-origin", "x"], "not an origin"),
        (["run", "--model", "./no such folder", "hi"], "no such folder"),
        (["run", ""], "There is no prompt"),
        (["run"], "There is no prompt"),
        (["chat", "--url", "http://127.0.0.1:1", "--num-pages", "5"], "--num-pages"),
        (["chat", "--page-size", "7"], "page_size must be one of"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(args, words, here, monkeypatch, capsys):
    flags = ("--port", "0") if args[0] == "serve" and "--port" not in args else ()
    assert invoke(monkeypatch, *args, *flags) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_users_mistake_shows_no_traceback():
    assert "no such folder" in error_line(mlxserve("serve", "--model", "./no such folder"))


@pytest.mark.parametrize("args", [["serve", "--port", "x"], ["serve", "--no-such-flag"], ["fly"]])
def test_a_wrong_flag_is_a_usage_error(args):
    result = mlxserve(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_an_address_of_another_machine_is_one_clear_error():
    result = mlxserve("serve", "--host", "203.0.113.7", MLXSERVE_API_KEY="k" * 32)
    assert "Cannot listen on 203.0.113.7 port 8000" in error_line(result)


def test_a_port_in_use_is_one_clear_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = error_line(mlxserve("serve", "--port", str(port)))
    assert f"Port {port} on 127.0.0.1 is in use" in line
    assert "--port" in line


# run


@pytest.fixture(scope="module")
def model(write_model, tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("run"), "qwen3"))


def run_model(model: str, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    flags = ("--model", model, "--num-pages", "64", "--temperature", "0", "--max-tokens", "8")
    return mlxserve("run", *flags, *args, stdin=stdin)


def test_a_prompt_gets_the_same_answer_as_argument_and_from_a_pipe(model):
    argument = run_model(model, "Hello there", "--stats")
    assert argument.returncode == 0, argument.stderr
    assert argument.stdout.strip()
    assert argument.stdout.endswith("\n")
    assert re.search(r"prompt \d+ tokens \(0 cached\), answer \d+ tokens", argument.stderr)
    piped = run_model(model, stdin="Hello there\n")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, argument.stdout, "")
    dash = run_model(model, "-", stdin="Hello there")
    assert dash.stdout == argument.stdout


class ScriptedChat:
    """Stands in for a model: answers with given texts and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        from mlxserve.chat import Delta, Usage
        from mlxserve.request import FinishReason
        from mlxserve.sampling_params import SamplingParams

        self.default_params = SamplingParams(temperature=0.3)
        self.is_closed = False
        *first, last = [Delta(text, (1,)) for text in texts]
        usage = Usage(10, len(texts), 4)
        self._deltas = [*first, Delta(last.text, (1,), (), FinishReason.STOP, usage)]

    def render(self, messages: Any) -> list[int]:
        self.messages = messages
        return [1]

    async def submit(self, prompt: list[int], params: Any) -> Any:
        self.params = params

        async def deltas() -> Any:
            for delta in self._deltas:
                yield delta

        return deltas()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def script(*texts: str, stdin: str | None = None) -> ScriptedChat:
        chat = ScriptedChat(*texts)
        monkeypatch.setattr(run_command, "build", lambda config: chat)
        terminal = types.SimpleNamespace(isatty=lambda: stdin is None, read=lambda: stdin or "")
        monkeypatch.setattr(sys, "stdin", terminal)
        return chat

    return script


def test_run_sends_system_prompt_and_parameters(scripted, monkeypatch, capsys):
    chat = scripted("fine", stdin="a file\n")
    args = ("run", "Summarise:", "--system", "Be brief.", "--max-tokens", "7")
    assert invoke(monkeypatch, *args) == 0
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Summarise:\n\na file"},
    ]
    assert chat.params.max_tokens == 7
    assert chat.params.temperature == 0.3
    assert chat.is_closed
    assert capsys.readouterr().out == "fine\n"


def test_run_on_a_terminal_does_not_wait_for_input(scripted, monkeypatch, capsys):
    chat = scripted("fine")
    assert invoke(monkeypatch, "run", "Hi", "--temperature", "0") == 0
    assert chat.messages == [{"role": "user", "content": "Hi"}]
    assert chat.params.temperature == 0


def test_run_ends_with_exactly_one_line_feed(scripted, monkeypatch, capsys):
    scripted("a\n", "b\n")
    assert invoke(monkeypatch, "run", "Hi") == 0
    assert capsys.readouterr().out == "a\nb\n"


def test_run_escapes_control_characters(scripted, monkeypatch, capsys):
    scripted("\x1b]0;title\x07", "a\tb\r\u202eevil\x9b2J")
    assert invoke(monkeypatch, "run", "Hi") == 0
    assert capsys.readouterr().out == "\\x1b]0;title\\x07a\tb\\r\\u202eevil\\x9b2J\n"


def test_run_reports_speed_and_cache_on_stderr(scripted, monkeypatch, capsys):
    scripted("a", "b", "c")
    assert invoke(monkeypatch, "run", "Hi", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert err.startswith("prompt 10 tokens (4 cached), answer 3 tokens, first after ")


def test_run_into_a_closed_pipe_ends_without_a_traceback(model):
    script = f"{sys.executable} -m mlxserve run -m {model} --num-pages 64 --temperature 0 hi | true"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    assert result.returncode == 1


# chat


@pytest.fixture
def tui(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def main(**kwargs: Any) -> int:
        asked.update(kwargs)
        return 3

    monkeypatch.setitem(sys.modules, "tui.launch", types.SimpleNamespace(main=main))
    return asked


def test_chat_passes_the_servers_flags_to_the_terminal(tui, monkeypatch):
    args = ("chat", "--model", "org/name", "--num-pages", "9", "--no-enable-prefix-caching")
    assert invoke(monkeypatch, *args) == 3
    assert tui == {
        "url": None,
        "model": None,
        "engine_args": [
            "--model", "org/name", "--num-pages", "9", "--no-enable-prefix-caching",
        ],
        "server_args": ("--keys-file", "none"),
        "frame": None,
    }  # fmt: skip


def test_chat_attaches_to_a_running_server(tui, monkeypatch):
    assert invoke(monkeypatch, "chat", "--url", "http://127.0.0.1:9", "--model", "m") == 3
    assert (tui["url"], tui["model"], tui["engine_args"]) == ("http://127.0.0.1:9", "m", [])


def test_another_package_named_tui_is_named(tmp_path):
    (tmp_path / "tui").mkdir()
    (tmp_path / "tui" / "__init__.py").write_text("")
    info = tmp_path / "other_tui-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tui\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("tui\n")
    (info / "RECORD").write_text("tui/__init__.py,,\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['mlxserve', 'chat']\n"
        "from mlxserve.cli import main; main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    line = error_line(result)
    assert "'other-tui'" in line
    assert str(tmp_path / "tui" / "__init__.py") in line


def test_a_missing_dependency_of_the_terminal_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(**_: Any) -> int:
        import textual  # noqa: F401

        return 0

    monkeypatch.setitem(sys.modules, "tui.launch", types.SimpleNamespace(main=main))
    monkeypatch.setitem(sys.modules, "textual", None)
    assert invoke(monkeypatch, "chat") == 1
    assert "needs the package 'textual'" in capsys.readouterr().err


# doctor


def test_doctor_exits_with_1_if_a_finding_is_broken(monkeypatch, capsys):
    from mlxserve.doctor import report
    from mlxserve.doctor.finding import Finding, Grade

    findings = [Finding("python", "3.11"), Finding("matmul", "1", Grade.SLOW)]
    monkeypatch.setattr(report, "diagnose", lambda: iter(findings))
    assert invoke(monkeypatch, "doctor") == 0
    broken = Finding("self-test", "no", Grade.BROKEN)
    monkeypatch.setattr(report, "diagnose", lambda: iter([broken, *findings]))
    assert invoke(monkeypatch, "doctor") == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-3:] == [str(finding) for finding in (broken, *findings)]


# bench


def test_bench_has_commands_of_its_own():
    result = mlxserve("bench", "--help")
    assert result.returncode == 0
    assert "mlxserve bench" in result.stdout
    assert "decode" in result.stdout
    assert mlxserve("bench", "decode", "--no-such-flag").returncode == 2


def test_a_mistake_in_a_benchmark_is_one_line():
    assert "no such folder" in error_line(
        mlxserve("bench", "decode", "--model", "./no such folder")
    )
