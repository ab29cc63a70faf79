"""Help of commands in plain words: typer's own names Python's types and cuts sentences short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])

# typer's placeholders are Python's types.
_PLACEHOLDERS = {
    "<list[": "<",
    "]>": ">",
    "<str>": "<text>",
    "<int>": "<number>",
    "<int range>": "<number>",
    "<float>": "<number>",
    "<float range>": "<number>",
    "<Path>": "<path>",
}

# Characters of a command in a list: its sentence is wrapped, not cut.
_WHOLE = 200


class PlainCommand(TyperCommand):
    """A command whose help names values as a person would: `key create [OPTIONS] NAME`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line after the command: options, then arguments."""
        pieces = [self.options_metavar] if self.options_metavar else []
        return [*pieces, *(_usage(p) for p in self.get_params(ctx) if _is_argument(p))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options."""
        parameters = self.get_params(ctx)
        for title, is_argument in (("Arguments", True), ("Options", False)):
            records = [
                record
                for parameter in parameters
                if _is_argument(parameter) is is_argument
                if (record := help_record(ctx, parameter)) is not None
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class PlainGroup(TyperGroup):
    """A group that lists its commands with the whole first sentence of their help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the commands and what they do."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        write_commands(formatter, "Commands", commands)


class PlainTyper(typer.Typer):
    """An application whose groups and commands have plain help."""

    def __init__(self, *, cls: type[TyperGroup] = PlainGroup, **settings: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(
        self,
        name: str | None = None,
        *,
        cls: type[TyperCommand] | None = PlainCommand,
        **settings: Any,
    ) -> Callable[[Function], Function]:
        """Return a decorator that registers a command, as typer's."""
        return super().command(name, cls=cls, **settings)


def write_commands(formatter: Any, title: str, commands: list[tuple[str, Any]]) -> None:
    """Write a section with a row for each command."""
    with formatter.section(title):
        formatter.write_dl(
            [(name, command.get_short_help_str(_WHOLE)) for name, command in commands]
        )


def help_record(ctx: Any, parameter: Any) -> tuple[str, str] | None:
    """Return the name and the help of an argument or option; None if it is hidden."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    name, text = record
    if _is_argument(parameter):
        choices = f" {name.split()[-1]}" if "|" in name else ""
        name = _argument(parameter) + choices
        text = text.removesuffix("  [required]").replace("; required]", "]")
    for theirs, ours in _PLACEHOLDERS.items():
        name = name.replace(theirs, ours)
    return name, text


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _argument(parameter: Any) -> str:
    """Return NAME, NAME... if it may be repeated, or the placeholder that was declared."""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    return f"{parameter.name.upper()}{'...' if parameter.nargs != 1 else ''}"


def _usage(parameter: Any) -> str:
    name = _argument(parameter)
    return name if parameter.required or name.startswith("[") else f"[{name}]"
