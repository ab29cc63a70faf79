"""`mlxserve chat`: the terminal, over a server of its own or one that runs already."""

# Annotations are read by typer at run time, so this file does not postpone them.

from typing import Annotated, Any

import typer

from mlxserve.cli.options import PanelCommand
from mlxserve.cli.settings import Settings
from mlxserve.cli.talk import run_terminal


class ChatCommand(PanelCommand):
    """Its context's `obj` is what the terminal shows already, or None."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """What is wrong with a flag is printed: not on a screen that is about to go."""
        try:
            return super().make_context(*args, **kwargs)
        except BaseException:
            parent = kwargs.get("parent")
            if parent is not None and parent.obj is not None:
                parent.obj.close()
            raise


def chat(
    ctx: typer.Context,
    settings: Settings,
    url: Annotated[
        str | None,
        typer.Option(help="A running OpenAI-compatible server to attach to; else one is started."),
    ] = None,
) -> None:
    """Chat in the terminal."""
    run_terminal(settings, url, ctx.obj)
