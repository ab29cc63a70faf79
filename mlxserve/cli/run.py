"""`mlxserve run`: answers one prompt on the terminal or in a pipe."""

# Annotations are read by typer at run time, so this file does not postpone them.

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli.building import build
from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import print_safe
from mlxserve.cli.terminal import run_terminal
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidRequest

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat
    from mlxserve.text.deltas import Usage


def run(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; piped input is appended. - reads stdin only.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and cached tokens to stderr.")
    ] = False,
) -> None:
    """Answer one prompt on the terminal or in a pipe; without one, open the chat."""
    if prompt is None and sys.stdin.isatty() and (system, max_tokens, temperature) == (None,) * 3:
        run_terminal(settings, None, None)
    config = settings.build(EngineConfig)
    from mlxserve.api.server import logs

    logs.configure("warning")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": whole_prompt(prompt)})
    given = {"max_tokens": max_tokens, "temperature": temperature, "stop_on_repetition": True}
    chat = build(config)
    try:
        report = asyncio.run(_stream_answer(chat, messages, given))
    except BrokenPipeError:  # the reader (such as `head`) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        chat.close()
    if stats:
        print_safe(report, to=sys.stderr)


def whole_prompt(prompt: str | None) -> str:
    """The argument followed by the piped text. Raises InvalidRequest if both are missing."""
    wants_stdin = prompt is None or prompt == "-" or not sys.stdin.isatty()
    piped = sys.stdin.read().rstrip("\n") if wants_stdin else ""
    parts = [part for part in (None if prompt == "-" else prompt, piped) if part]
    if not parts:
        raise InvalidRequest("There is no prompt. Pass it as an argument or pipe it in.")
    return "\n\n".join(parts)


async def _stream_answer(
    chat: "Chat", messages: Sequence[Mapping[str, str]], given: Mapping[str, Any]
) -> str:
    """Print the answer while it streams; returns a line about its speed."""
    asked = {name: value for name, value in given.items() if value is not None}
    params = replace(chat.default_params, **asked)
    prompt = await asyncio.to_thread(chat.render, messages)
    started = time.perf_counter()
    first = started
    text = "\n"
    async for delta in await chat.submit(prompt, params):
        if first == started and delta.token_ids:
            first = time.perf_counter()
        text = delta.text or text
        print_safe(delta.text, end="")
    print_safe("" if text.endswith("\n") else "\n", end="")
    assert delta.usage is not None
    return _speed(delta.usage, first - started, time.perf_counter() - first)


def _speed(usage: "Usage", to_first: float, after_first: float) -> str:
    rate = (usage.completion_tokens - 1) / after_first if after_first > 0 else 0.0
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"answer {usage.completion_tokens} tokens, first after {to_first:.2f} s, "
        f"then {rate:.1f} tokens/s"
    )
