"""The command line: parse, build, hand over to a front. One file for each command.

Imports of the engine, the server and the terminal happen inside the commands, so that `--help`
answers at once and `mlxserve chat` never loads mlx.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

import sys
from typing import Annotated, NoReturn

import typer

from mlxserve import __version__
from mlxserve.api.config import ServerConfig
from mlxserve.cli import bench, chat, doctor, key, launch, models, prefix, run, serve
from mlxserve.cli.options import PanelCommand, with_settings
from mlxserve.config import EngineConfig
from mlxserve.errors import MlxServeError

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


app.command(cls=PanelCommand)(with_settings(ServerConfig, EngineConfig)(serve.serve))
app.command(cls=PanelCommand)(with_settings(EngineConfig)(run.run))
app.command(cls=PanelCommand)(with_settings(EngineConfig)(chat.chat))
app.command()(launch.launch)
app.add_typer(prefix.app, name="prefix")
app.add_typer(key.app, name="key")
app.command()(models.models)
app.command()(models.pull)
app.command()(doctor.doctor)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(bench.bench)
