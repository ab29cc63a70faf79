"""`mlxserve chat`: the terminal chat, on a server that it starts or one that is running."""

# Annotations are read by typer at run time, so this file does not postpone them.

from typing import Annotated, Any

import typer

from mlxserve.cli.options import ModelName, PanelCommand
from mlxserve.cli.settings import Settings
from mlxserve.cli.terminal import run_terminal


class ChatCommand(PanelCommand):
    """Its context's `obj` is the first frame already on the screen, or None."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Close the first frame before an invalid flag is reported, so the message stays visible."""
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
    model_name: ModelName = None,
    url: Annotated[
        str | None,
        typer.Option(help="Use this running OpenAI-compatible server instead of starting one."),
    ] = None,
    continues: Annotated[
        bool, typer.Option("--continue", "-c", help="Open the last chat.")
    ] = False,
    own_server: Annotated[
        bool, typer.Option("--own-server", help="Start a server even if one of yours runs.")
    ] = False,
) -> None:
    """Chat with a model in the terminal.

    Uses a server of yours that runs (see `mlxserve ps`), unless a model or other options are given;
    else starts one, which ends with the chat.
    """
    if model_name is not None:
        settings = settings.with_model(model_name)
    run_terminal(settings, url, ctx.obj, own_server=own_server, continues=continues)
