"""Help names arguments and values as a person would, and cuts no sentence."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mlxserve.system.command_help import PlainTyper


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture
def app() -> PlainTyper:
    app = PlainTyper(add_completion=False)

    @app.command()
    def paint(
        room: Annotated[str, typer.Argument(help="The room.")],
        colour: Annotated[Colour, typer.Argument(help="Its colour.")],
        tools: Annotated[list[Path] | None, typer.Argument(help="What to use.")] = None,
        layers: Annotated[int, typer.Option(min=1, help="How many layers.")] = 2,
        litres: Annotated[float | None, typer.Option(help="How much.")] = None,
        words: Annotated[list[str] | None, typer.Option(help="Words on the wall.")] = None,
    ) -> None:
        """Paint a room in a colour, with the tools that are named, or with a brush and patience."""

    @app.command()
    def leave(place: Annotated[float, typer.Argument(min=0, help="Which door.")]) -> None:
        """Leave."""

    return app


def test_usage_has_required_arguments_plain_and_optional_ones_in_brackets(app: PlainTyper) -> None:
    text = CliRunner().invoke(app, ["paint", "--help"]).output
    assert "paint [OPTIONS] ROOM COLOUR [TOOLS...]\n" in text
    assert "ROOM               The room.\n" in text, "no type, and not 'required' once more"
    assert "COLOUR <red|blue>  Its colour.\n" in text
    assert "TOOLS...           What to use.\n" in text


def test_values_of_options_have_no_types_of_python(app: PlainTyper) -> None:
    text = CliRunner().invoke(app, ["paint", "--help"]).output
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "--layers <number> How many layers. [default: 2; x>=1]" in rows
    assert "--litres <number> How much." in rows
    assert "--words <text> Words on the wall." in rows


def test_the_range_of_an_argument_is_kept(app: PlainTyper) -> None:
    assert "PLACE  Which door.  [x>=0]\n" in CliRunner().invoke(app, ["leave", "--help"]).output


def test_a_list_of_commands_is_wrapped_and_not_cut(app: PlainTyper) -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    assert "brush and patience." in " ".join(text.split())
    assert "..." not in text.partition("Commands:")[2]
