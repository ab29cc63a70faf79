"""Flags: the options of the configs as flags with their help, under their panels' names.

`python -m mlxserve.cli.options` prints them as the tables of docs/tuning.md.
"""

# Annotations are read by typer at run time, so this file does not postpone them.

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxserve.api.config import ServerConfig
from mlxserve.cli.completion import models_here
from mlxserve.cli.settings import Settings
from mlxserve.cli.streams import print_safe
from mlxserve.core.config import EngineConfig
from mlxserve.core.option import NamedOption, Options, options_of
from mlxserve.system.command_help import PlainCommand, help_record

# Every config: a file serves all commands, so each command knows the options of all.
SCHEMAS: tuple[type[Options], ...] = (ServerConfig, EngineConfig)


ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="The model to use, as --model names it.",
        autocompletion=models_here,
    ),
]
_ALL = "mlxserve.help_all"  # key of a context's `meta`
_BASIC = {option.name for s in SCHEMAS for option in options_of(s) if option.declared.is_basic}


class PanelCommand(PlainCommand):
    """Plain help: the command's own options and the basic ones, or all, grouped by panel.

    typer's own panels are tables that cut long flags at 80 columns: --max-num-batched-t…
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shows_all = ctx.meta.get(_ALL, False)
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = help_record(ctx, parameter)
            panel = getattr(parameter, "rich_help_panel", None)
            if record is None or not (shows_all or panel is None or parameter.name in _BASIC):
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            title = panel if panel is not None and shows_all else kind
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples verbatim."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"  {line}\n")


def _show_all(ctx: typer.Context, is_requested: bool) -> None:
    if is_requested:
        ctx.meta[_ALL] = True
        print_safe(ctx.get_help())
        raise typer.Exit


def with_settings(*schemas: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per option of the schemas; it takes the outcome as `settings`."""
    is_of_server = ServerConfig in schemas
    flags = {
        option.name: _flag(option, may_repeat=is_of_server and option.name == "model")
        for schema in schemas
        for option in options_of(schema)
        if not option.declared.is_tuning
    }
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                help="TOML file of options.  [default: config.toml in the configuration folder]",
            ),
        ],
    )

    help_all = inspect.Parameter(
        "help_all",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool,
            typer.Option(
                "--help-all",
                help="Show all options and exit.",
                is_eager=True,
                callback=_show_all,
            ),
        ],
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(*, config: Path | None, help_all: bool, **arguments: Any) -> None:  # noqa: ARG001
            values = {name: _value(arguments.pop(name)) for name in flags}
            command(**arguments, settings=Settings.read(SCHEMAS, values, os.environ, config))

        own = [
            parameter
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "settings"
        ]
        with_flags.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for parameter in (*own, config, *flags.values(), help_all)
            ]
        )
        return with_flags

    return decorate


def _value(value: Any) -> Any:
    """Value of a repeatable flag: a tuple, or None if it was not used."""
    if isinstance(value, list):
        return tuple(value) or None
    return value


def _flag(option: NamedOption, *, may_repeat: bool = False) -> inspect.Parameter:
    """Return the parameter from which typer makes the flag; its default None means not used.

    may_repeat: although the option has one value, such as the model of an engine
    """
    default = option.default_text()
    flag = typer.Option(
        *_declarations(option),
        help=option.declared.help + (f"  [default: {default}]" if default else ""),
        metavar=_metavar(option),
        rich_help_panel=option.declared.panel,
        autocompletion=models_here if option.name == "model" else None,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None if may_repeat else _flag_type(option) | None, flag],
    )


def _flag_type(option: NamedOption) -> Any:
    if option.kind == tuple[str, ...]:
        return list[str]
    return option.kind if option.kind in (bool, int, float) else str


def _declarations(option: NamedOption) -> list[str]:
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind is bool and option.default is True:
        return [f"{flag}/--no-{flag[2:]}"]
    return [flag, *filter(None, [option.declared.short])]


def _metavar(option: NamedOption) -> str | None:
    """Placeholder of the value: its choices, its unit, or its type."""
    if option.kind is bool:
        return None
    if option.choices:
        return f"<{'|'.join(map(str, option.choices))}>"
    types = {int: "number", float: "number"}
    return f"<{option.declared.unit or types.get(option.kind, 'text')}>"


def options_table() -> str:
    """Return every option as Markdown, one table per panel, as in docs/tuning.md."""
    options = [option for schema in SCHEMAS for option in options_of(schema)]
    flags = [option for option in options if not option.declared.is_tuning]
    tables = []
    for panel in dict.fromkeys(option.declared.panel for option in flags):
        rows = [_row(option) for option in flags if option.declared.panel == panel]
        tables.append("\n".join([f"### {panel}\n", "| Flag | Default | |", "|---|---|---|", *rows]))
    return "\n\n".join(tables) + "\n"


def tuning_table() -> str:
    """Return the options of the file's table [tuning] as Markdown: what docs/tuning.md holds."""
    options = [option for schema in SCHEMAS for option in options_of(schema)]
    rows = [_row(option) for option in options if option.declared.is_tuning]
    return "\n".join(["| Name | Default | |", "|---|---|---|", *rows]) + "\n"


def _row(option: NamedOption) -> str:
    value = f" {_metavar(option)}" if _metavar(option) else ""
    names = ", ".join(_declarations(option)).replace("/", ", ")
    if option.declared.is_tuning:
        names = option.name
    cells = (f"`{names}{value}`", option.default_text(), option.declared.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print_safe(options_table() + "\n" + tuning_table(), end="")
