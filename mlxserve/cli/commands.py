"""Registers every command and its flags.

The commands import the engine, the server and the terminal inside their functions, so `--help` is
immediate and `mlxserve chat` never loads mlx.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

from typing import Annotated

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli import (
    bench,
    cache,
    chat,
    doctor,
    key,
    launch,
    models,
    prefix,
    pull,
    run,
    serve,
    service,
)
from mlxserve.cli.options import PanelCommand, with_settings
from mlxserve.config import EngineConfig
from mlxserve.version import __version__

app = typer.Typer(
    rich_markup_mode=None,
    help="A local inference server for Apple Silicon: paged, prefix-cached KV, chunked prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    """Options before the command."""


app.command(cls=PanelCommand)(with_settings(ServerConfig, EngineConfig)(serve.serve))
app.command(cls=PanelCommand)(with_settings(EngineConfig)(run.run))
app.command(cls=chat.ChatCommand)(with_settings(EngineConfig)(chat.chat))
app.command()(launch.launch)
app.add_typer(prefix.app, name="prefix")
app.add_typer(cache.app, name="cache")
app.add_typer(key.app, name="key")
app.add_typer(service.app, name="service")
app.command(cls=PanelCommand)(with_settings(EngineConfig)(models.models))
app.command()(pull.pull)
app.command()(doctor.doctor)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(bench.bench)
