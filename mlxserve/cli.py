"""The command line: parse, build, hand over to a front.

Imports of the engine, the server and the terminal happen inside the commands, so that `--help`
answers at once and `mlxserve chat` never loads mlx.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

import asyncio
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand

from mlxserve import __version__
from mlxserve.config import EngineConfig
from mlxserve.errors import InvalidConfig, InvalidRequest, MlxServeError

if TYPE_CHECKING:
    from mlxserve.chat import Chat, Usage

Engine = Mapping[str, Any]  # values of EngineConfig, as given on the command line

OPTION_PANELS = {
    "Model": ("model", "revision", "max_model_len", "seed"),
    "Memory": ("gpu_memory_utilization", "num_pages", "page_size", "attention_backend"),
    "Scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_waiting",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "page_aligned_scheduling",
        "long_prefill_token_threshold",
        "itl_target_ms",
        "max_pinned_fraction",
        "preemption_mode",
        "swap_space",
        "swap_dir",
    ),
    "Log": ("disable_log_stats", "log_stats_interval"),
}


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PanelCommand(TyperCommand):
    """Plain help whose options stand under their panels' names.

    typer's own panels are tables that cut long flags at 80 columns: --max-num-batched-t…
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(panel, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


app = typer.Typer(
    rich_markup_mode=None,
    help="A local inference server for Apple Silicon: paged, prefix-cached KV, chunked prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """The console script. What a user can act on is one line, never a traceback."""
    try:
        app()
    except MlxServeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag per option of EngineConfig; it takes their values as `engine`."""
    flags = {parameter.name: parameter for parameter in _engine_flags()}

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        engine = {name: given.pop(name) for name in flags}
        command(**given, engine=engine)

    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "engine"
    ]
    with_flags.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in (*own, *flags.values())
        ]
    )
    return with_flags


def flags_of(engine: Engine) -> list[str]:
    """The command line that gives these values again; defaults are left out."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    flags: list[str] = []
    for name, value in engine.items():
        if value == defaults[name]:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _engine_flags() -> list[inspect.Parameter]:
    types = get_type_hints(EngineConfig)
    help_of = _documented_options()
    panel_of = {name: panel for panel, names in OPTION_PANELS.items() for name in names}
    order = {name: number for number, name in enumerate(panel_of)}
    parameters = []
    for field in sorted(fields(EngineConfig), key=lambda field: order.get(field.name, -1)):
        assert field.default is not MISSING
        option = typer.Option(
            *_declarations(field.name, types[field.name], field.default),
            help=help_of.get(field.name),
            rich_help_panel=panel_of.get(field.name),
        )
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[types[field.name], option],
            )
        )
    return parameters


def _declarations(name: str, kind: object, default: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if name == "model":
        return [flag, "-m"]
    if kind is bool and default is True:
        return [f"{flag}/--no-{flag[2:]}"]
    return [flag]


def _documented_options() -> dict[str, str]:
    """The text after `name: ` of each option in EngineConfig's docstring, as help."""
    names = {field.name for field in fields(EngineConfig)}
    texts: dict[str, str] = {}
    current = None
    for line in inspect.cleandoc(EngineConfig.__doc__ or "").splitlines():
        name, _, text = line.partition(": ")
        if name in names:
            current, texts[name] = name, text
        elif current is not None and line.startswith(" "):
            texts[current] += f" {line.strip()}"
        else:
            current = None
    return {name: _as_help(text) for name, text in texts.items()}


def _as_help(text: str) -> str:
    for written, read in (("None is", "by default"), ("None measures", "by default it measures")):
        text = text.replace(written, read)
    return f"{text[:1].upper()}{text[1:]}."


def _show_version(asked: bool) -> None:
    if asked:
        print(f"mlxserve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """What every command shares: nothing but the version."""


# ---- serve


@app.command(cls=PanelCommand)
@engine_options
def serve(
    engine: Engine,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name for the model; may be given again.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with one API key per line; MLXSERVE_API_KEY in the environment is another."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name the Host header may have besides the address; may be repeated."),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page that may call, as https://chat.example; may be repeated."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for answers under way when the server is stopped.")
    ] = 5.0,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Stop when stdin reaches its end.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="The least that is logged.", rich_help_panel="Log")
    ] = LogLevel.INFO,
) -> None:
    """Serve the model over HTTP, in OpenAI's shapes."""
    signal.signal(signal.SIGTERM, _leave)  # until the server has handlers of its own
    from mlxserve.api import logs
    from mlxserve.api.access import read_access
    from mlxserve.api.app import create_app
    from mlxserve.api.server import Server, bind, stop_at_end_of_input, url_of
    from mlxserve.api.server import serve as run_server

    logs.configure(log_level)
    config = EngineConfig(**engine)
    access = read_access(
        host,
        key_file=api_key_file,
        environment_key=os.environ.get("MLXSERVE_API_KEY"),
        hosts=allowed_host or (),
        origins=allowed_origin or (),
    )
    with bind(host, port) as listener:
        if exit_with_parent:
            stop_at_end_of_input()
        chat = _build(config)
        server = Server(
            create_app(chat, aliases=alias or (), access=access),
            on_ready=lambda: print(f"mlxserve is ready at {url_of(listener)}", flush=True),
            stop_engine=chat.close,
            drain_seconds=drain_seconds,
        )
        try:
            run_server(server, listener)
        finally:
            chat.close()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def _build(config: EngineConfig) -> "Chat":
    from mlxserve.build import build_chat

    return build_chat(config)


# ---- run


@app.command(cls=PanelCommand)
@engine_options
def run(
    engine: Engine,
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; piped input is added to it. - is stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="End the answer after so many.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Report speed and cached tokens on stderr.")
    ] = False,
) -> None:
    """Answer one prompt on the terminal or in a pipe."""
    from mlxserve.api import logs

    logs.configure("warning")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": _whole_prompt(prompt)})
    given = {"max_tokens": max_tokens, "temperature": temperature}
    config = EngineConfig(**engine)
    chat = _build(config)
    try:
        report = asyncio.run(_stream_answer(chat, messages, given))
    except BrokenPipeError:  # the reader (`head`, say) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        chat.close()
    if stats:
        print(report, file=sys.stderr)


def _whole_prompt(prompt: str | None) -> str:
    """The argument and the piped text, as one. Raises InvalidRequest when there is neither."""
    wants_stdin = prompt is None or prompt == "-" or not sys.stdin.isatty()
    piped = sys.stdin.read().rstrip("\n") if wants_stdin else ""
    parts = [part for part in (None if prompt == "-" else prompt, piped) if part]
    if not parts:
        raise InvalidRequest("There is no prompt: give it as an argument or pipe it in.")
    return "\n\n".join(parts)


async def _stream_answer(
    chat: "Chat", messages: Sequence[Mapping[str, str]], given: Mapping[str, Any]
) -> str:
    """Prints the answer as it comes; returns a line about its speed."""
    from mlxserve.api.logs import ESCAPES

    asked = {name: value for name, value in given.items() if value is not None}
    params = replace(chat.default_params, **asked)
    prompt = await asyncio.to_thread(chat.render, messages)
    # A model's text goes to the terminal as text: it moves no cursor and sets no title.
    escapes = {code: text for code, text in ESCAPES.items() if chr(code) not in "\n\t"}
    started = time.perf_counter()
    first = started
    text = "\n"
    async for delta in await chat.submit(prompt, params):
        if first == started and delta.token_ids:
            first = time.perf_counter()
        text = delta.text or text
        print(delta.text.translate(escapes), end="", flush=True)
    print("" if text.endswith("\n") else "\n", end="", flush=True)
    assert delta.usage is not None
    return _speed(delta.usage, first - started, time.perf_counter() - first)


def _speed(usage: "Usage", to_first: float, after_first: float) -> str:
    rate = (usage.completion_tokens - 1) / after_first if after_first > 0 else 0.0
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"answer {usage.completion_tokens} tokens, first after {to_first:.2f} s, "
        f"then {rate:.1f} tokens/s"
    )


# ---- chat


@app.command(cls=PanelCommand)
@engine_options
def chat(
    engine: Engine,
    url: Annotated[
        str | None,
        typer.Option(help="A running OpenAI-compatible server to attach to; else one is started."),
    ] = None,
) -> None:
    """Chat in the terminal."""
    flags = flags_of({name: value for name, value in engine.items() if name != "model"})
    if url is not None and flags:
        raise InvalidConfig(
            f"{flags[0]} sets up a server that is started here; with --url it has no effect. "
            "Leave one of the two out."
        )
    EngineConfig(**engine)  # refuse what the server would refuse, before the screen is taken
    tui_main = _import_tui()
    model = engine["model"]
    if url is None and model is not None:
        flags = ["--model", model, *flags]
    sys.exit(tui_main(url=url, model=None if url is None else model, server_args=flags))


def _import_tui() -> Callable[..., int]:
    """Our terminal's `main`. Raises InvalidConfig when another package is in its way."""
    try:
        from tui.app import main as tui_main
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "tui":
            raise InvalidConfig(
                f"`mlxserve chat` needs the package {error.name.split('.')[0]!r}, which is not "
                "installed. Install mlxserve again to get it."
            ) from error
        raise InvalidConfig(_what_hides_our_tui()) from error
    return tui_main


def _what_hides_our_tui() -> str:
    owners = [
        name for name in packages_distributions().get("tui", []) if name.lower() != "mlxserve"
    ]
    spec = find_spec("tui")
    if spec is None:
        return "`mlxserve chat` cannot find its package `tui`. Install mlxserve again."
    where = spec.origin or next(iter(spec.submodule_search_locations or ()), "in memory")
    owner = f"the package {owners[0]!r}" if owners else "something"
    return (
        f"`mlxserve chat` is hidden by {owner}, which also has a module named `tui` ({where}). "
        "Uninstall it, or install mlxserve in an environment of its own."
    )


# ---- doctor


@app.command()
def doctor() -> None:
    """Check this machine and this installation; the table can be pasted into a report."""
    from mlxserve.doctor import diagnose

    is_well = True
    for finding in diagnose():
        print(finding, flush=True)
        is_well = is_well and not finding.is_broken
    if not is_well:
        sys.exit(1)


# ---- bench


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure this machine, always beside a baseline in the same run."""
    from mlxserve.bench.cli import app as bench_app

    bench_app(args=context.args, prog_name="mlxserve bench")
