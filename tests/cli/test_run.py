"""`mlxserve run`: one answer, from an argument or a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mlxserve.cli import run as run_command
from mlxserve.cli.running_servers import registered
from mlxserve.cli.settings import Settings
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.images.data_urls import data_url, file_of_data_url
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.cli.commands import ROOT, CommandResult, Run, error_line, mlxserve
from tests.cli.recording_server import RecordingServer
from tests.images.files import file_of, picture
from tests.model.small_vision import write_vision_model
from tests.text.documents.files import jpeg, pdf, scan


@pytest.fixture(scope="module")
def model(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("run"), "qwen3"))


def run_model(model: str, *args: str, stdin: str | None = None) -> CommandResult:
    flags = ("--model", model, "--num-pages", "64", "--temperature", "0", "--max-tokens", "8")
    return mlxserve("run", *flags, *args, stdin=stdin)


@pytest.mark.slow
def test_a_prompt_gets_the_same_answer_as_argument_and_from_a_pipe(model: str) -> None:
    argument = run_model(model, "Hello there", "--stats")
    assert argument.code == 0, argument.err
    assert argument.out.strip()
    assert argument.out.endswith("\n")
    assert re.search(r"prompt \d+ tokens \(0 cached\), answer \d+ tokens", argument.err)
    assert run_model(model, stdin="Hello there\n") == (0, argument.out, "")


@pytest.mark.slow
def test_run_between_two_pipes_of_which_the_second_is_closed_ends_without_a_traceback(
    model: str,
) -> None:
    script = f"echo hi | {sys.executable} -m mlxserve run -m {model} --num-pages 64 | true"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "")


class ScriptedChat:
    """A chat that answers with given texts and records the request."""

    def __init__(self, *texts: str) -> None:
        self.default_params = SamplingParams(temperature=0.3)
        self.params = self.default_params
        self.messages: Sequence[object] = ()
        self.is_closed = False
        self.adapter: str | None = None
        *first, last = [Delta(text, (1,)) for text in texts]
        usage = Usage(10, len(texts), 4)
        self.deltas = [*first, Delta(last.text, (1,), (), FinishReason.STOP, usage)]

    def require_writer(self) -> ScriptedChat:
        """Its own writer."""
        return self

    def with_adapter(self, name: str | None) -> ScriptedChat:
        self.adapter = name
        return self

    def render(self, messages: Sequence[object]) -> list[int]:
        self.messages = messages
        return [1]

    async def submit(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        assert prompt == [1]
        self.params = params

        async def deltas() -> AsyncIterator[Delta]:
            for delta in self.deltas:
                yield delta

        return deltas()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedChat]:
    """A function that makes `mlxserve run` answer with these texts."""

    def script(*texts: str) -> ScriptedChat:
        chat = ScriptedChat(*texts)
        monkeypatch.setattr(run_command, "build", lambda _config: chat)
        return chat

    return script


def test_run_sends_system_prompt_and_parameters(
    scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    chat = scripted("fine")
    args = ("run", "Summarise:", "--system", "Be brief.", "--max-tokens", "7")
    assert run(*args, stdin="a file\n") == (0, "fine\n", "")
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Summarise:\n\na file"},
    ]
    assert (chat.params.max_tokens, chat.params.temperature) == (7, 0.3)
    assert chat.is_closed


@pytest.mark.parametrize(("flags", "answers"), [((), None), (("--adapter", "a=b"), "a")])
def test_run_answers_with_the_adapter_that_its_flag_names(
    flags: tuple[str, ...], answers: str | None, scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    chat = scripted("fine")
    assert run("run", "--own", *flags, stdin="Hello\n") == (0, "fine\n", "")
    assert chat.adapter == answers


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_run_without_an_argument_or_with_a_dash_reads_the_pipe(
    arguments: tuple[str, ...], scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    chat = scripted("fine")
    assert run("run", *arguments, stdin="Hello there\n") == (0, "fine\n", "")
    assert chat.messages == [{"role": "user", "content": "Hello there"}]


def test_run_without_a_prompt_on_a_terminal_opens_the_chat(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_chat(settings: Settings, *_: object, **_how: object) -> None:
        opened.append(settings.flags)
        sys.exit(0)

    monkeypatch.setattr("mlxserve.cli.run.run_terminal", open_chat)
    assert run("run", "--num-pages", "9", stdin=None) == (0, "", "")
    assert opened == [{"num_pages": 9}]


def test_run_on_a_terminal_does_not_wait_for_input(
    scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    chat = scripted("fine")
    assert run("run", "Hi", "--temperature", "0", stdin=None).code == 0
    assert chat.messages == [{"role": "user", "content": "Hi"}]
    assert chat.params.temperature == 0


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (("a\n", "b\n"), "a\nb\n"),  # exactly one line feed at the end
        (("a\n", "b"), "a\nb\n"),
        (
            ("\x1b]0;title\x07", "a\tb\r\u202eevil\x9b2J"),
            "\\x1b]0;title\\x07a\tb\\r\\u202eevil\\x9b2J\n",
        ),
    ],
)
def test_run_escapes_control_characters_and_ends_with_one_line_feed(
    texts: tuple[str, ...], shown: str, scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    scripted(*texts)
    assert run("run", "Hi", stdin=None) == (0, shown, "")


def test_run_reports_speed_and_cache_on_stderr(
    scripted: Callable[..., ScriptedChat], run: Run
) -> None:
    scripted("a", "b", "c")
    outcome = run("run", "Hi", "--stats", stdin=None)
    assert outcome.out == "abc\n"
    assert outcome.err.startswith("prompt 10 tokens (4 cached), answer 3 tokens, first after ")


# ---- by a server that runs


@pytest.fixture
def running(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[RecordingServer]:
    """A server of this user, with the model org/served. It answers "Hi.", after a thought."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    pieces = [
        {"role": "assistant"},
        {"reasoning_content": "hm"},
        {"content": "Hi"},
        {"content": "."},
    ]
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 8},
        "cache": {"num_pages": 1},
    }
    server.answer_events(
        *({"choices": [{"index": 0, "delta": piece}]} for piece in pieces),
        {"choices": [], "usage": usage},
    )
    with registered(server.url, ["org/served"], needs_key=False):
        yield server


@pytest.mark.parametrize("flags", [(), ("--model", "org/served")])
def test_run_asks_the_running_server(
    running: RecordingServer, run: Run, flags: tuple[str, ...]
) -> None:
    outcome = run("run", *flags, "Hello", "--stats", "--max-tokens", "7", "--system", "Be brief.")
    assert (outcome.code, outcome.out) == (0, "Hi.\n")
    prompt = "prompt 9 tokens (1 page from the cache, 1 token computed)"
    assert outcome.err.startswith(f"{prompt}, answer 4 tokens, first after ")
    [(method, path, body, key)] = running.asked
    assert (method, path, key) == ("POST", "/v1/chat/completions", None)
    assert body == {
        "model": "org/served",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "max_tokens": 7,
        "stop_on_repetition": True,
    }


def test_run_shows_images_to_the_running_server(
    running: RecordingServer, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(file_of(picture()))
    assert run("run", "--image", str(file), "--image", str(file), "What?").code == 0
    [(_, _, body, _)] = running.asked
    [message] = body["messages"]
    shown = {
        "type": "image_url",
        "image_url": {"url": data_url(b64encode(file.read_bytes()).decode())},
    }
    assert message["content"] == [shown, shown, {"type": "text", "text": "What?"}]
    said = error_line(run("run", "--image", f"{tmp_path}/b.png", "What?"))
    assert said.rstrip().endswith("b.png'. Give --image the path of a file.")


def test_run_sends_files_and_folders_as_text_before_the_prompt(
    running: RecordingServer, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(["It begins.", "It ends in May."]))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "b.md").write_bytes("café".encode("latin-1"))
    outcome = run("run", "-f", f"{tmp_path}/a.pdf", "--file", f"{tmp_path}/notes", "When?")
    assert (outcome.code, outcome.out) == (0, "Hi.\n")
    assert outcome.err == f"{tmp_path}/a.pdf: 2 pages\n{tmp_path}/notes: 1 file\n"
    [(_, _, body, _)] = running.asked
    *files, question = body["messages"][0]["content"]
    assert [part["file"]["filename"] for part in files] == ["a.pdf", "notes/"]
    contents = [file_of_data_url(part["file"]["file_data"]).decode() for part in files]
    assert contents[0] == "It begins.\fIt ends in May."
    assert contents[1].endswith("\fb.md:\ncafé")
    assert question == {"type": "text", "text": "When?"}


def test_run_sends_a_scan_as_it_is_for_a_model_that_sees(
    running: RecordingServer, run: Run, tmp_path: Path
) -> None:
    data = scan([jpeg()])
    (tmp_path / "a.pdf").write_bytes(data)
    outcome = run("run", "-f", f"{tmp_path}/a.pdf", "When?")
    assert outcome.err == f"{tmp_path}/a.pdf: scanned pages\n"
    [(_, _, body, _)] = running.asked
    sent = body["messages"][0]["content"][0]["file"]
    assert (sent["filename"], file_of_data_url(sent["file_data"])) == ("a.pdf", data)


def test_run_says_which_part_of_a_document_the_server_read(
    running: RecordingServer, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("It ends in May.")
    note = "1 of 3 parts of \\u00e4.txt were read: the rest does not fit the context"
    running.headers = {"x-mlxserve-warning": f"the model is another; {note}"}
    outcome = run("run", "-f", f"{tmp_path}/a.txt", "When?")
    said = outcome.err.splitlines()[1]
    assert said == "note: 1 of 3 parts of ä.txt were read: the rest does not fit the context"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.bin", b"\0\1", "a.bin is not text."),
        ("a.pdf", b"%PDF-1.4", "a.pdf is damaged"),
        ("none.pdf", None, "There is no file or folder"),
    ],
)
def test_run_names_a_document_that_cannot_be_read(
    run: Run, tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    assert words in error_line(run("run", "-f", f"{tmp_path}/{name}", "What?"))


@pytest.mark.parametrize(
    ("data", "sent"), [("café\r\n".encode("latin-1"), "café"), ("à".encode("utf-16"), "à")]
)
def test_piped_text_is_read_in_any_encoding(
    running: RecordingServer, run: Run, data: bytes, sent: str
) -> None:
    assert run("run", "What?", stdin=data).code == 0
    [(_, _, body, _)] = running.asked
    assert body["messages"][0]["content"] == f"What?\n\n{sent}"


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"%PDF-1.7 \xff", "stdin is a PDF file, not text."), (b"\0\1", "stdin is not text.")],
)
def test_piped_data_that_is_no_text_is_named(run: Run, data: bytes, words: str) -> None:
    assert words in error_line(run("run", "What?", stdin=data))


def test_run_refuses_images_for_a_model_that_reads_text_only(
    model: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(file_of(picture()))
    result = run("run", "-m", model, "--num-pages", "64", "--image", f"{tmp_path}/a.png", "What?")
    assert "image parts are not supported: this model reads text only" in error_line(result)


@pytest.mark.slow
def test_run_shows_an_image_to_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_vision_model(folder, "qwen2_5_vl")
    (tmp_path / "a.png").write_bytes(file_of(picture(112, 84)))
    result = run_model(str(folder), "--image", str(tmp_path / "a.png"), "What?", "--stats")
    assert result.code == 0, result.err
    assert re.search(r"prompt (\d+) tokens", result.err)


@pytest.mark.parametrize(
    "flags", [("--own",), ("--num-pages", "9"), ("--model", "org/other"), ("org/other",)]
)
def test_run_loads_the_model_itself_where_that_is_asked(
    running: RecordingServer,
    scripted: Callable[..., ScriptedChat],
    run: Run,
    flags: tuple[str, ...],
) -> None:
    scripted("mine")
    assert run("run", *flags, "Hello") == (0, "mine\n", "")
    assert running.asked == []


def test_run_uses_the_model_of_the_configuration(
    running: RecordingServer,
    scripted: Callable[..., ScriptedChat],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted("mine")
    monkeypatch.setenv("MLXSERVE_MODEL", "org/other")
    assert run("run", "Hello").out == "mine\n"
    monkeypatch.setenv("MLXSERVE_MODEL", "org/served")
    assert run("run", "Hello").out == "Hi.\n"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--temperature", "9", "--temperature: must be from 0 (greedy) to 2, got 9"),
        ("--max-tokens", "0", "--max-tokens: must be at least 1"),
        ("--num-pages", "0", "--num-pages must be a whole number of pages"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_flag(
    run: Run, flag: str, value: str, words: str
) -> None:
    assert words in error_line(run("run", "Hello", flag, value))


def test_an_error_of_the_server_is_one_line(running: RecordingServer, run: Run) -> None:
    running.answer({"error": {"message": "too long."}}, 400)
    assert "refused: too long." in error_line(run("run", "Hello"))
    running.answer_events({"error": {"message": "the engine failed"}})
    assert "stopped: the engine failed" in error_line(run("run", "Hello"))


def test_an_answer_that_is_all_thought_says_so(running: RecordingServer, run: Run) -> None:
    running.answer_events({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    assert run("run", "Hello") == (0, "", "note: the answer ended in the model's thinking\n")


# ---- which word is the model


def test_a_model_may_stand_before_the_prompt() -> None:
    for words, model, prompt in [
        ((), None, None),
        (("hello",), None, "hello"),
        (("note: this",), None, "note: this"),
        (("a:b",), None, "a:b"),
        (("and/or",), None, "and/or"),
        (("qwen3:4b",), "qwen3:4b", None),
        (("qwen9:4b",), "qwen9:4b", None),
        (("mlxserve-mini", "hi"), "mlxserve-mini", "hi"),
        (("llama3.2", "hi"), "llama3.2", "hi"),
        (("org/name", "hi"), "org/name", "hi"),
    ]:
        assert run_command.model_and_prompt(words) == (model, prompt), words


@pytest.mark.parametrize("words", [("why", "is"), ("why", "is", "the", "sky", "blue?")])
def test_a_prompt_without_quotes_is_explained(words: tuple[str, ...], run: Run) -> None:
    assert "Give the prompt as one argument, in quotes" in error_line(run("run", *words))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "9"),
        ("--temperature", "nan"),
    ],
)
def test_a_value_that_no_model_takes_is_refused_before_one_is_loaded(
    flag: str, value: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "build", lambda _: pytest.fail("a model was loaded"))
    assert flag in error_line(run("run", flag, value, "hi"))


def test_a_family_alone_gets_its_sizes(run: Run) -> None:
    line = error_line(run("run", "llama3.2", "hi"))
    assert "Did you mean llama3.2:1b or llama3.2:3b?" in line


@pytest.mark.parametrize("command", ["run", "serve", "chat"])
def test_a_model_is_named_once(command: str, run: Run) -> None:
    line = error_line(run(command, "qwen3:4b", "-m", "qwen3:8b"))
    assert "named twice: 'qwen3:4b' and --model" in line


def test_serve_takes_a_model_before_its_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "Did you mean qwen3:4b" in error_line(run("serve", "qwen3:4bb", "--port", "0"))
