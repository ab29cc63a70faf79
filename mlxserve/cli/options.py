"""Options: every field of the schemas as a flag, with its help, under its group's name."""

# Annotations are read by typer at run time, so this file does not postpone them.

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlxserve.cli.settings import Settings, defaults_of, types_of

OPTION_PANELS = {
    "Server": ("host", "port", "alias", "drain_seconds"),
    "Security": ("keys_file", "api_key_file", "allowed_host", "allowed_origin"),
    "Limits": (
        "max_requests_per_key",
        "requests_per_minute_per_key",
        "max_connections",
        "max_connections_per_address",
        "header_timeout",
        "body_timeout",
        "write_timeout",
    ),
    "Model": ("model", "revision", "max_model_len", "seed"),
    "Memory": ("gpu_memory_utilization", "num_pages", "page_size", "attention_backend"),
    "Scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_waiting",
        "max_overtakes",
        "ageing_steps",
        "prefix_follow_pages",
        "growth_pages",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "page_aligned_scheduling",
        "budget_mode",
        "long_prefill_token_threshold",
        "itl_target_ms",
        "max_pinned_fraction",
        "page_tail",
        "tool_keep_seconds",
        "hot_after_hits",
        "preemption_mode",
        "immune_after_preemptions",
        "swap_space",
        "swap_dir",
    ),
    "Log": ("log_level", "disable_log_stats", "log_stats_interval", "trace"),
}


class PanelCommand(TyperCommand):
    """Plain help whose options stand under their panels' names.

    typer's own panels are tables that cut long flags at 80 columns: --max-num-batched-t…
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(panel, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def with_settings(*schemas: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per option of the schemas; it takes the outcome as `settings`."""
    known = _all_schemas(schemas)
    flags = {parameter.name: parameter for schema in schemas for parameter in _flags(schema)}
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                help="TOML file of options; by default config.toml in the configuration folder.",
            ),
        ],
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_flags(*, config: Path | None, **given: Any) -> None:
            asked = {name: _value(given.pop(name)) for name in flags}
            command(**given, settings=Settings.read(known, asked, os.environ, config))

        own = [
            parameter
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "settings"
        ]
        with_flags.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for parameter in (*own, config, *flags.values())
            ]
        )
        return with_flags

    return decorate


def _all_schemas(schemas: tuple[type, ...]) -> tuple[type, ...]:
    """Every schema there is: a file serves all commands, so each knows the options of all."""
    from mlxserve.api.config import ServerConfig
    from mlxserve.config import EngineConfig

    assert set(schemas) <= {EngineConfig, ServerConfig}
    return EngineConfig, ServerConfig


def _value(given: Any) -> Any:
    """Of a flag that may be repeated: a tuple, or None if it was not given at all."""
    if isinstance(given, list):
        return tuple(given) or None
    return given


def _flags(schema: type) -> list[inspect.Parameter]:
    types, defaults = types_of(schema), defaults_of(schema)
    help_of = documented_options(schema)
    panel_of = {name: panel for panel, names in OPTION_PANELS.items() for name in names}
    order = {name: number for number, name in enumerate(panel_of)}
    parameters = []
    for name in sorted(types, key=order.__getitem__):
        option = typer.Option(
            *_declarations(name, types[name], defaults[name]),
            help=_with_default(help_of.get(name, ""), defaults[name]),
            rich_help_panel=panel_of.get(name),
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_flag_type(types[name]), option],
            )
        )
    return parameters


def _flag_type(kind: Any) -> Any:
    """None stands for a flag that was not given."""
    return (list[str] if kind == tuple[str, ...] else kind) | None


def _declarations(name: str, kind: object, default: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if name == "model":
        return [flag, "-m"]
    if kind is bool and default is True:
        return [f"{flag}/--no-{flag[2:]}"]
    return [flag]


def _with_default(text: str, default: object) -> str:
    if default is None or default == () or default is False:
        return text
    return f"{text}  [default: {str(default).lower() if default is True else default}]"


def documented_options(schema: type) -> dict[str, str]:
    """The text after `name: ` of each option in the schema's docstring, as help."""
    names = types_of(schema).keys()
    texts: dict[str, str] = {}
    current = None
    for line in inspect.cleandoc(schema.__doc__ or "").splitlines():
        name, _, text = line.partition(": ")
        if name in names:
            current, texts[name] = name, text
        elif current is not None and line.startswith(" "):
            texts[current] += f" {line.strip()}"
        else:
            current = None
    return {name: _as_help(text) for name, text in texts.items()}


def _as_help(text: str) -> str:
    for written, read in (("None is", "by default"), ("None measures", "by default it measures")):
        text = text.replace(written, read)
    return f"{text[:1].upper()}{text[1:]}."
