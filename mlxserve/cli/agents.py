"""Configures coding agents to use a local server.

A single session writes no files: Claude Code is configured by environment variables, Codex by
overrides on its command line, opencode by a configuration in a variable. A permanent installation
writes the same settings to the agent's own file. Checked against the agents' documentation as of
November 2026, and run by `pytest -m clients`.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidConfig
from mlxserve.text.controls import LADDER

KEY_VARIABLE = "MLXSERVE_API_KEY"
NO_KEY = "none"  # for agents that require a key
_DEFAULT_EFFORT = "high"
MAX_OUTPUT = 32_000  # tokens; the most that agents ask for


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """The server and the model to use. `url` has no path.

    effort: the one to ask for, where the model does not know the agents' own default
    sees: the model reads images
    """

    url: str
    model: str
    context: int
    key: str | None = None
    effort: str | None = None
    sees: bool = False


def agent_effort(efforts: Sequence[str]) -> str | None:
    """The effort that an agent should ask for; None if the model knows high, the agents' own default."""
    known = [level for level in LADDER if level in efforts]
    if not known or _DEFAULT_EFFORT in known:
        return None
    place = LADDER.index(_DEFAULT_EFFORT)
    return min(reversed(known), key=lambda level: abs(LADDER.index(level) - place))


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One run of an agent: its command line, the variables to set and the variables to unset."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    without: tuple[str, ...] = ()


class Agent(ABC):
    """One coding agent."""

    name: str
    install_hint: str

    @abstractmethod
    def session(self, target: AgentTarget) -> AgentSession:
        """Return one run that uses the server."""

    @abstractmethod
    def file(self) -> Path:
        """Return the agent's configuration file."""

    @abstractmethod
    def configured(self, text: str, target: AgentTarget) -> str:
        """Add the server to the configuration `text`. Raises InvalidConfig."""

    def usage(self) -> str:
        """Explain how to use the written configuration."""
        return f"`{self.name}` uses this server from now on"


class Claude(Agent):
    name = "claude"
    install_hint = "npm install -g @anthropic-ai/claude-code"

    def session(self, target: AgentTarget) -> AgentSession:
        # If both were set, it would also send the key of the real service here.
        # `/effort` still changes it, which it would not if it were set by a variable.
        effort = ("--effort", target.effort) if target.effort else ()
        command = (self.name, *effort)
        return AgentSession(command, _claude_variables(target), without=("ANTHROPIC_API_KEY",))

    def file(self) -> Path:
        return (
            Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "settings.json"
        )

    def configured(self, text: str, target: AgentTarget) -> str:
        settings = _object(text, self.file())
        settings["env"] = {**settings.get("env", {}), **_claude_variables(target)}
        # In Claude Code max is an effort of one session, not of the settings.
        if target.effort not in (None, "max"):
            settings.setdefault("effortLevel", target.effort)
        return _json(settings)


class Codex(Agent):
    name = "codex"
    install_hint = "npm install -g @openai/codex"

    def session(self, target: AgentTarget) -> AgentSession:
        provider = ", ".join(f"{name} = {value}" for name, value in _codex_provider(target).items())
        overrides = {
            "model_provider": '"mlxserve"',
            "model_providers.mlxserve": f"{{ {provider} }}",
            "model_context_window": str(target.context),
            **_codex_effort(target),
        }
        flags = [part for name, value in overrides.items() for part in ("-c", f"{name}={value}")]
        environment = {KEY_VARIABLE: target.key} if target.key else {}
        return AgentSession((self.name, "--model", target.model, *flags), environment)

    def file(self) -> Path:
        """A profile in a file of its own, so the user's configuration stays unchanged."""
        home = Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")
        return home / "mlxserve.core.config.toml"

    def configured(self, text: str, target: AgentTarget) -> str:  # noqa: ARG002  (the file is ours)
        lines = [
            f"model = {json.dumps(target.model)}",
            'model_provider = "mlxserve"',
            f"model_context_window = {target.context}",
            *(f"{name} = {value}" for name, value in _codex_effort(target).items()),
            "",
            "[model_providers.mlxserve]",
            *(f"{name} = {value}" for name, value in _codex_provider(target).items()),
        ]
        return "\n".join(lines) + "\n"

    def usage(self) -> str:
        return "`codex --profile mlxserve` uses this server from now on"


class OpenCode(Agent):
    name = "opencode"
    install_hint = "npm install -g opencode-ai"

    def session(self, target: AgentTarget) -> AgentSession:
        environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(_opencode(target))}
        if target.key:
            environment[KEY_VARIABLE] = target.key
        return AgentSession((self.name,), environment)

    def file(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME")
        return (Path(base) if base else Path.home() / ".config") / "opencode" / "opencode.json"

    def configured(self, text: str, target: AgentTarget) -> str:
        settings = _object(text, self.file())
        ours = _opencode(target)
        providers = {**settings.get("provider", {}), **ours["provider"]}
        return _json({**settings, **ours, "provider": providers})


AGENTS: Mapping[str, Agent] = {agent.name: agent for agent in (Claude(), Codex(), OpenCode())}


def _claude_variables(target: AgentTarget) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        # It takes a model that it does not know to have a context of a million tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        # The header differs in every request and precedes everything that could be cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex_effort(target: AgentTarget) -> dict[str, str]:
    """Codex has no word for max."""
    if target.effort is None:
        return {}
    level = "xhigh" if target.effort == "max" else target.effort
    return {"model_reasoning_effort": json.dumps(level)}


def _codex_provider(target: AgentTarget) -> dict[str, str]:
    """The provider's settings as TOML values. Codex only speaks the Responses API."""
    provider = {
        "name": '"mlxserve"',
        "base_url": json.dumps(f"{target.url}/v1"),
        "wire_api": '"responses"',
    }
    return {**provider, "env_key": json.dumps(KEY_VARIABLE)} if target.key else provider


def _opencode(target: AgentTarget) -> dict[str, Any]:
    limit = {"context": target.context, "output": min(MAX_OUTPUT, target.context)}
    options = {"options": {"reasoningEffort": target.effort}} if target.effort else {}
    # It keeps images from a model that it does not know.
    seeing = {"modalities": {"input": ["text", "image"], "output": ["text"]}} if target.sees else {}
    model = {"name": target.model, "limit": limit, **options, **seeing}
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": f"mlxserve/{target.model}",
        "provider": {
            "mlxserve": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlxserve",
                "options": {
                    "baseURL": f"{target.url}/v1",
                    "apiKey": f"{{env:{KEY_VARIABLE}}}" if target.key else NO_KEY,
                },
                "models": {target.model: model},
            }
        },
    }


def _object(text: str, file: Path) -> dict[str, Any]:
    """Parse a JSON object; an empty file is an empty object."""
    try:
        content = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidConfig(
            f"{file} is not plain JSON ({error}), so nothing was written. Leave out --install to "
            "launch the agent without changing its files."
        ) from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{file} does not contain a JSON object, so nothing was written.")
    return content


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
