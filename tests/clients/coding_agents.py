"""Claude Code, Codex and opencode as programs: how each is started, and the calls that its tools take."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxserve.cli.agents import AGENTS, AgentTarget
from tests.clients.agent_server import AgentServer, call

SECONDS = 180  # for a session, most of which is the agent's own start
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
# What no test wants: updates, lists of models from the internet, and questions.
VARIABLES = {
    "IS_SANDBOX": "1",  # Claude Code asks for it where it runs as root
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


@dataclass(frozen=True)
class CodingAgent:
    """
    arguments: after those of `mlxserve launch`; the last one is the task
    resumes: the same for the session before
    shell, read, look: calls that run a command, read a text and look at an image
    delegate: a call that gives a task to an agent of its own, and one that waits for it, if there is one
    tool: a name that only the main conversation's tools have
    compacts: what only the request for a summary says
    context: in which two long results do not fit, where the agent counts by itself
    effort: the arguments that set one
    instead_of_an_image: what a model that reads text only gets of one, ours or the agent's
    """

    arguments: Sequence[str]
    resumes: Sequence[str]
    shell: Callable[[str], str]
    read: Callable[[Path], str]
    look: Callable[[Path], str]
    delegate: Sequence[Callable[[str], str]]
    tool: str
    compacts: str
    context: int | None = None
    effort: Callable[[str], Sequence[str]] | None = None
    instead_of_an_image: str = "[image left out: this model reads text only]"


_CLAUDE = "--dangerously-skip-permissions"
_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CODING_AGENTS: Mapping[str, CodingAgent] = {
    "claude": CodingAgent(
        (_CLAUDE, "-p"),
        (_CLAUDE, "--continue", "-p"),
        lambda command: call("Bash", command=command, description="Run it"),
        lambda path: call("Read", file_path=str(path)),
        lambda path: call("Read", file_path=str(path)),
        [
            lambda task: call(
                "Agent", description="Look", prompt=task, subagent_type="general-purpose"
            )
        ],
        '"name": "Bash"',
        "Do NOT call any tools",
        effort=lambda level: ("--effort", level),
    ),
    "codex": CodingAgent(
        ("exec", *_CODEX),
        ("exec", *_CODEX, "resume", "--last"),
        lambda command: call("exec_command", cmd=command, max_output_tokens=20_000),
        lambda path: call("exec_command", cmd=f"cat {path}"),
        lambda path: call("view_image", path=str(path)),
        [
            lambda task: call("multi_agent_v1.spawn_agent", message=task),
            lambda started: call("multi_agent_v1.wait_agent", targets=[started]),
        ],
        '"name": "exec_command"',
        "CONTEXT CHECKPOINT COMPACTION",
        context=28_000,
        effort=lambda level: ("-c", f"model_reasoning_effort={level}"),
    ),
    "opencode": CodingAgent(
        ("run",),
        ("run", "--continue"),
        lambda command: call("bash", command=command, description="Run it"),
        lambda path: call("read", filePath=str(path)),
        lambda path: call("read", filePath=str(path)),
        [lambda task: call("task", description="Look", prompt=task, subagent_type="general")],
        '"name": "bash"',
        "summary process or that context was compacted",
        instead_of_an_image="Cannot read image (this model does not support image input)",
    ),
}


def needs(program: str, package: str) -> None:
    """Skip the test where a program is not on the PATH."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on the PATH: install {package}")


@dataclass(frozen=True)
class Workplace:
    """A folder for a program to work in, with a text and an image, and a home folder of its own."""

    project: Path
    home: Path

    @classmethod
    def create(cls, folder: Path) -> Workplace:
        created = cls(folder / "project", folder / "home")
        created.project.mkdir()
        created.home.mkdir()
        (created.project / "a.txt").write_text("alpha\n")
        (created.project / "p.png").write_bytes(base64.b64decode(PIXEL))
        return created

    def environment(
        self, variables: Mapping[str, str], without: Sequence[str] = ()
    ) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in without}
        own = {"HOME": str(self.home), "PWD": str(self.project)}
        return {**kept, **variables, **own, **VARIABLES}

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], without: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a program until it ends."""
        return subprocess.run(
            command,
            cwd=self.project,
            env=self.environment(variables, without),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )


@dataclass(frozen=True)
class AgentRun:
    """Sessions of one agent on one server, as `mlxserve launch` starts them."""

    name: str
    server: AgentServer
    workplace: Workplace
    target: AgentTarget

    @property
    def agent(self) -> CodingAgent:
        return CODING_AGENTS[self.name]

    @property
    def own_prompts(self) -> list[str]:
        """The prompts of conversations, without those for titles."""
        return [prompt for prompt in self.server.prompts if self.agent.tool in prompt]

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [*AGENTS[self.name].session(self.target).command, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        session = AGENTS[self.name].session(self.target)
        return self.workplace.environment(session.environment, session.without)

    def start(self, task: str, options: Sequence[str] = ()) -> str:
        """Return what a new session prints."""
        return self._ended([*options, *self.agent.arguments, task])

    def resume(self, task: str) -> str:
        """Return what the newest session prints for another task."""
        return self._ended([*self.agent.resumes, task])

    def _ended(self, arguments: Sequence[str]) -> str:
        session = AGENTS[self.name].session(self.target)
        ended = self.workplace.run(self.command(arguments), session.environment, session.without)
        # opencode ends with an error even if it has continued after a refusal.
        is_well = ended.returncode == 0 or self.server.engine.num_refused
        assert is_well, ended.stdout[-2_000:] + ended.stderr[-2_000:]
        return ended.stdout

    @contextlib.contextmanager
    def process(self, arguments: Sequence[str], **pipes: int) -> Iterator[subprocess.Popen[str]]:
        """Run the agent beside the test, which it does not survive."""
        with subprocess.Popen(
            self.command(arguments),
            cwd=self.workplace.project,
            env=self.environment,
            text=True,
            start_new_session=True,
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.DEVNULL,
                **pipes,
            },
        ) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def agent_run(
    name: str, server: AgentServer, workplace: Workplace, *, context: int = 0, sees: bool = False
) -> AgentRun:
    needs(name, AGENTS[name].install_hint.rpartition(" ")[2])
    context = context or server.engine.max_model_len
    return AgentRun(name, server, workplace, AgentTarget(server.url, "local", context, sees=sees))
