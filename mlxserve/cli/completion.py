"""`mlxserve completion`: the script that completes commands and flags in a shell."""

# Annotations are read by typer at run time, so this file does not postpone them.

from enum import StrEnum
from typing import Annotated

import typer

from mlxserve.cli.streams import print_safe

VARIABLE = "_MLXSERVE_COMPLETE"  # set by a shell that asks what completes a line


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that will read the script.")],
) -> None:
    """Print a script for tab completion.

    bash: echo 'eval "$(mlxserve completion bash)"' >> ~/.bashrc

    zsh: echo 'eval "$(mlxserve completion zsh)"' >> ~/.zshrc

    fish: mlxserve completion fish > ~/.config/fish/completions/mlxserve.fish
    """
    from typer import completion as of_typer

    script = of_typer.get_completion_script(  # type: ignore[attr-defined]
        prog_name="mlxserve", complete_var=VARIABLE, shell=str(shell)
    )
    print_safe(script)


def teach_shells() -> None:
    """Have typer answer shells in the form that its scripts expect, which it learns from its own option
    `--show-completion` otherwise."""
    from typer import completion as of_typer

    of_typer.completion_init()  # type: ignore[attr-defined]
