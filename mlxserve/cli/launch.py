"""`mlxserve launch`: runs a coding agent on a running server, once or (--install) permanently.

--install changes the agent's configuration file and keeps the previous content next to it:

    settings.json                      the agent's file with the server added
    settings.json.before-mlxserve      the file before --install; empty if there was none
    settings.json.with-mlxserve        the file that --undo replaced
"""

# Annotations are read by typer at run time, so this file does not postpone them.

import difflib
import os
import shlex
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli.agents import AGENTS, Agent, AgentSession, AgentTarget, agent_effort
from mlxserve.cli.completion import served_models
from mlxserve.cli.options import SCHEMAS
from mlxserve.cli.own_key import key_for
from mlxserve.cli.remote import Url, ask, url_of
from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, MlxServeError
from mlxserve.hub.known_models import repository_of
from mlxserve.system.files import write_new

# Tokens; an agent's own prompt and tools need about half of that.
ENOUGH_CONTEXT = 32_000
AgentName = StrEnum("AgentName", list(AGENTS))  # type: ignore[misc]


def launch(
    agent: Annotated[AgentName, typer.Argument(help="The agent to start.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for the agent, after --.", metavar="-- ..."),
    ] = None,
    url: Url = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to use; by default that of `mlxserve use`, if the server has it, or its first.",
            autocompletion=served_models,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done without doing it.")
    ] = False,
    install: Annotated[
        bool,
        typer.Option("--install", help="Configure the agent permanently instead of starting it."),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Undo --install instead of starting the agent.")
    ] = False,
) -> None:
    """Start a coding agent that uses a running server."""
    chosen = AGENTS[agent]
    if undo:
        _undo(chosen.file(), dry_run=dry_run)
        return
    target = _target(url, model)
    if install:
        _install(chosen, target, dry_run=dry_run)
        return
    session = chosen.session(target)
    command = (*session.command, *(arguments or ()))
    if dry_run:
        print_safe(_script(session, command, target.key))
        return
    _start(chosen, session, command)


def _target(url: str | None, model: str | None) -> AgentTarget:
    """Find the running server and the model. Raises ServerError if no server answers."""
    usual = Settings.read(SCHEMAS, {}, os.environ).build(EngineConfig).model
    url = url_of(url, model or usual)
    cards = ask(url, "GET", "/v1/models")["data"]
    names = [name for card in cards for name in (card["id"], *card.get("aliases", ()))]
    if model is None and usual is not None:
        model = next((name for name in names if name in (usual, repository_of(usual))), None)
    if model is not None and model not in names:
        raise InvalidConfig(f"The server has no model {model[:80]!r}. It has {', '.join(names)}.")
    model = model or names[0]
    card = next(card for card in cards if model in (card["id"], *card.get("aliases", ())))
    context = int(card.get("max_model_len") or card.get("context_length") or 0)
    if context < ENOUGH_CONTEXT:
        print_safe(
            f"note: {model} has a context of {context:,} tokens, and agents need {ENOUGH_CONTEXT:,} or more. "
            "Serve another one (`mlxserve models` says what fits), or raise --max-model-len.",
            to=sys.stderr,
        )
    effort = agent_effort(card.get("thinking", {}).get("efforts", ()))
    sees = "vision" in card.get("capabilities", ())
    return AgentTarget(url, model, context, key_for(url), effort, sees)


def _start(agent: Agent, session: AgentSession, command: tuple[str, ...]) -> None:
    """Replace this process with the agent."""
    program = shutil.which(command[0])
    if program is None:
        raise MlxServeError(
            f"{agent.name} is not installed, or not on the PATH. Install it with "
            f"`{agent.install_hint}`, or use --dry-run to see how it would be started."
        )
    kept = {name: value for name, value in os.environ.items() if name not in session.without}
    os.execve(program, command, {**kept, **session.environment})


def _script(session: AgentSession, command: tuple[str, ...], key: str | None) -> str:
    """Return the session as shell commands; the key stays in its variable."""
    lines = [f"unset {name}" for name in session.without]
    for name, value in session.environment.items():
        shown = '"$MLXSERVE_API_KEY"' if key and value == key else shlex.quote(value)
        lines += [f"export {name}={shown}"] if name != "MLXSERVE_API_KEY" else []
    return "\n".join([*lines, shlex.join(command)])


def _install(agent: Agent, target: AgentTarget, *, dry_run: bool) -> None:
    file, backup = agent.file(), _backup(agent.file())
    old = _read(file)
    new = agent.configured(old, target)
    if dry_run:
        hidden = new.replace(target.key, "***") if target.key else new
        names = (str(file), f"{file} (new)")
        diff = difflib.unified_diff(old.splitlines(), hidden.splitlines(), *names, lineterm="")
        print_safe("\n".join(diff))
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Keep the user's file, not what an earlier --install wrote.
        if not backup.exists():
            write_new(backup, old.encode())
        _write(file, new)
    except OSError as error:
        raise InvalidConfig(f"{file} cannot be written: {error}") from error
    print_safe(f"{agent.usage()}. Undo with `mlxserve launch {agent.name} --undo`.")


def _undo(file: Path, *, dry_run: bool) -> None:
    backup = _backup(file)
    if not backup.exists():
        raise InvalidConfig(f"There is nothing to undo: {backup} does not exist.")
    old = _read(backup)
    if dry_run:
        print_safe(
            f"Would restore {file}." if old else f"Would remove {file}: there was none before."
        )
        return
    if file.exists():
        file.replace(file.with_name(f"{file.name}.with-mlxserve"))
    if old:
        backup.replace(file)
    else:
        backup.unlink()
    print_safe(f"Restored {file}." if old else f"Removed {file}: there was none before.")


def _backup(file: Path) -> Path:
    return file.with_name(f"{file.name}.before-mlxserve")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{file} cannot be read: {error}") from error


def _write(file: Path, text: str) -> None:
    """Write a file, readable by its owner only if new: it may contain a key."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
