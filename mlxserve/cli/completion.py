"""`mlxserve completion`: the script that completes commands, flags and models in a shell."""

# Annotations are read by typer at run time, so this file does not postpone them.

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from mlxserve.cli.streams import print_safe

VARIABLE = "_MLXSERVE_COMPLETE"  # set by a shell that asks what completes a line
_PLAIN = re.compile(r"[\w./:@+-]+")  # names that no shell reads as anything else
# bash ends a word at a colon, which names such as qwen3.5:4b contain: ask for the whole word, and leave out
# what stands before the last colon already. For bash 3.2, macOS's, as well.
_WITH_COLONS = r"""
_mlxserve_completion_with_colons() {
    local COMP_WORDS COMP_CWORD line="${COMP_LINE:0:COMP_POINT}"
    local last="${line##*[[:space:]]}"
    read -ra COMP_WORDS <<< "$line"
    COMP_CWORD=${#COMP_WORDS[@]}
    [[ -n $last ]] && COMP_CWORD=$((COMP_CWORD - 1))
    _mlxserve_completion "$@"
    if [[ $last == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${last%:*}:"}")
    fi
}

complete -o default -F _mlxserve_completion_with_colons mlxserve"""


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
    print_safe(script + _WITH_COLONS if shell is Shell.BASH else script)


def teach_shells() -> None:
    """Set typer's completion to the form that its scripts expect.

    Otherwise it learns that from its own option `--show-completion`.
    """
    from typer import completion as of_typer

    of_typer.completion_init()  # type: ignore[attr-defined]


def models_here(incomplete: str) -> list[str]:
    """Complete an argument with names of models on this machine, short ones included."""
    return _names(incomplete, downloaded_only=False)


def downloaded_models(incomplete: str) -> list[str]:
    """Like `models_here`, for models that `mlxserve rm` deletes."""
    return _names(incomplete, downloaded_only=True)


def first_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Like `models_here`, for the first of several words."""
    return [] if ctx.params.get("words") else models_here(incomplete)


def well_known_models(incomplete: str) -> list[str]:
    """Complete short names of models that can be downloaded."""
    from mlxserve.hub.known_models import short_names

    return _offered(short_names(), incomplete)


def served_models(incomplete: str) -> list[str]:
    """Complete names of models that this user's servers have."""
    from mlxserve.cli.running_servers import running_servers

    return _offered((name for server in running_servers() for name in server.names), incomplete)


def _names(incomplete: str, *, downloaded_only: bool) -> list[str]:
    from mlxserve.hub.catalog import Origin, places
    from mlxserve.hub.known_models import short_name

    names = [
        name for name, source, _ in places() if not downloaded_only or source is Origin.DOWNLOADED
    ]
    short = [known for name in names if (known := short_name(name)) is not None]
    return _offered((*short, *names), incomplete)


def _offered(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin so, each once, without those that a shell would execute."""
    return [
        name
        for name in dict.fromkeys(names)
        if name.startswith(incomplete) and _PLAIN.fullmatch(name)
    ]
