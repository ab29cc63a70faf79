"""Registers every command and its flags.

The commands import the engine, the server and the terminal inside their functions, so `--help` is
immediate and `mlxserve chat` never loads mlx.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

from typing import Annotated, Any

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli import (
    bench,
    cache,
    chat,
    chats,
    completion,
    doctor,
    embed,
    key,
    launch,
    local_models,
    models,
    prefix,
    pull,
    run,
    search,
    serve,
    servers,
    service,
    uninstall,
    use,
)
from mlxserve.cli.options import PanelCommand, with_settings
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig
from mlxserve.core.version import __version__
from mlxserve.system.command_help import PlainGroup, PlainTyper, write_commands

# What other tools call our commands.
_OTHER_NAMES = {
    "list": "models",
    "ls": "models",
    "download": "pull",
    "remove": "rm",
    "delete": "rm",
    "status": "ps",
}


# What other tools have as commands, and where it is here.
_ELSEWHERE = {
    "version": "Run `mlxserve --version`.",
    "config": "Settings are in ~/.config/mlxserve/config.toml, and `mlxserve use MODEL` writes the model there.",
    "update": "Get the new version of the checkout (`git pull`), and run `uv tool install --reinstall .` in it (with extras: `'.[documents,mcp]'`).",
    "create": "Models are files: `mlxserve pull MODEL` gets one, and `mlxserve serve FOLDER` takes any folder.",
    "push": "mlxserve uploads nothing.",
}
_ELSEWHERE["settings"], _ELSEWHERE["upgrade"] = _ELSEWHERE["config"], _ELSEWHERE["update"]


# The sections of `mlxserve --help`, in their order.
_GROUPS = {
    "Use a model": ("chat", "chats", "run", "serve", "launch", "embed"),
    "Models": ("models", "use", "pull", "search", "show", "rm"),
    "Servers": ("ps", "stop", "logs", "service", "key", "prefix", "cache"),
    "This machine": ("doctor", "bench", "completion", "uninstall", "help"),
}

# typer's words for a bad value are those of the library that checks it.
_PLAINER = {
    "Input should be a valid integer, unable to parse string as an integer": "give a whole number.",
    "Input should be a valid number, unable to parse string as a number": "give a number.",
    "Input should be": "give a value",  # ... less than or equal to 9
    "Value error, ": "",
}


class Commands(PlainGroup):
    """A group with aliases that other tools use, and plain messages for unknown commands."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, _OTHER_NAMES.get(cmd_name, cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; say where it is what is none here."""
        if args and args[0] in _ELSEWHERE:
            ctx.fail(f"No such command {args[0]!r}. {_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by groups, each with the whole first sentence of its help."""
        for title, names in _GROUPS.items():
            write_commands(
                formatter, title, [(name, self.get_command(ctx, name)) for name in names]
            )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            for theirs, ours in _PLAINER.items():
                error.message = error.message.replace(theirs, ours)
            raise


app = PlainTyper(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Chats and coding agents on your Mac that do not read the same prompt twice.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print_safe(f"mlxserve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            help="Show the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options before the command."""


_SERVE_EXAMPLES = """\
mlxserve serve                                       the model of `mlxserve use`, else the included one
mlxserve serve qwen3.5:4b                            a model of Hugging Face
mlxserve serve ./my-model --port 9000                a folder
"""
_RUN_EXAMPLES = """\
mlxserve run "What is a page?"
mlxserve run qwen3.5:4b "Why is the sky blue?"
git diff | mlxserve run qwen3.5:4b "Write a commit message"
mlxserve run                                         open the chat
"""
_CHAT_EXAMPLES = """\
mlxserve chat                                        with your running server, or its own
mlxserve chat qwen3.5:4b
mlxserve chat --url http://127.0.0.1:8000            with a server that runs
"""

app.command(cls=PanelCommand, epilog=_SERVE_EXAMPLES)(
    with_settings(ServerConfig, EngineConfig)(serve.serve)
)
app.command(cls=PanelCommand, epilog=_RUN_EXAMPLES)(with_settings(EngineConfig)(run.run))
app.command(cls=chat.ChatCommand, epilog=_CHAT_EXAMPLES)(with_settings(EngineConfig)(chat.chat))
app.command()(launch.launch)
app.add_typer(chats.app, name="chats")
app.add_typer(prefix.app, name="prefix")
app.add_typer(cache.app, name="cache")
app.add_typer(key.app, name="key")
app.add_typer(service.app, name="service")
app.command(cls=PanelCommand)(with_settings(EngineConfig)(models.models))
app.command()(use.use)
app.command()(pull.pull)
app.command()(search.search)
app.command()(local_models.show)
app.command()(local_models.rm)
app.command()(servers.ps)
app.command()(servers.stop)
app.command()(servers.logs)
app.command()(embed.embed)
app.command()(uninstall.uninstall)
app.command()(doctor.doctor)
app.command()(completion.completion)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(bench.bench)


@app.command(name="help")
def help_(
    command: Annotated[
        list[str] | None, typer.Argument(help="A command, such as serve or key create.")
    ] = None,
) -> None:
    """Show the help of a command, or all commands."""
    app(args=[*(command or ()), "--help"], prog_name="mlxserve", obj=None)
