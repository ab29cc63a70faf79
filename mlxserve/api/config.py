"""ServerConfig: every option of the server, declared and checked once."""

# Annotations are read at run time, so this file does not postpone them.

from dataclasses import dataclass
from typing import Annotated

from mlxserve.chat.registry.keep_alive import keep_alive_seconds
from mlxserve.core.option import Option, Options

NO_FILE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Options):
    """The server's options. Raises InvalidConfig."""

    host: Annotated[
        str,
        Option(
            "Address to listen on. Any but this machine's own needs an API key.",
            "Server",
            "address",
            is_basic=True,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option("Port to listen on; 0 takes a free one.", "Server", ge=0, le=65_535, is_basic=True),
    ] = 8000
    alias: Annotated[
        tuple[str, ...],
        Option("A name for the first model; may be repeated.", "Server", is_basic=True),
    ] = ()
    keep_alive: Annotated[
        str,
        Option(
            'Unload a model that was loaded on demand after this long without a request: seconds or "5m"; '
            "0 at once, -1 never. Those of --model stay.",
            "Server",
            "duration",
        ),
    ] = "10m"
    strict_model_names: Annotated[
        bool,
        Option(
            "Refuse requests for a name that no model has, which the first model answers with a warning "
            "otherwise.",
            "Server",
        ),
    ] = False
    drain_seconds: Annotated[
        float,
        Option(
            "When the server stops, wait this long for running answers to finish.",
            "Server",
            "seconds",
            ge=0,
        ),
    ] = 5.0
    watchdog_seconds: Annotated[
        float,
        Option(
            "End the process, with exit code 71, when a step has not ended for this long; 0 never "
            "does.",
            "Recovery",
            "seconds",
            ge=0,
        ),
    ] = 600.0
    keys_file: Annotated[
        str | None,
        Option(
            f'File of the keys made by `mlxserve key create`; "{NO_FILE}" uses no file.',
            "Security",
            "file",
            default="keys.json in the configuration folder, if it exists",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Option(
            "File with one API key per line, in addition to MLXSERVE_API_KEY in the environment.",
            "Security",
            "file",
            default="no file",
        ),
    ] = None
    allowed_host: Annotated[
        tuple[str, ...],
        Option(
            "Another name that the Host header may have, such as a proxy's; may be repeated. Without API "
            "keys it opens the models to whoever reaches that name.",
            "Security",
        ),
    ] = ()
    behind_proxy: Annotated[
        bool,
        Option(
            "A reverse proxy or a tunnel that runs as this user passes on requests: none counts as this "
            "user's own by its connection.",
            "Security",
        ),
    ] = False
    allowed_origin: Annotated[
        tuple[str, ...],
        Option(
            "A web page that may call the server, such as https://chat.example; may be repeated.",
            "Security",
        ),
    ] = ()
    allow_remote_images: Annotated[
        tuple[str, ...],
        Option(
            "Fetch images that requests name by http and https URLs from this domain and its "
            'subdomains, at public addresses only; "*" for every domain. May be repeated.',
            "Security",
            "domain",
        ),
    ] = ()
    max_requests_per_key: Annotated[
        int,
        Option(
            "Most answers that one API key may have running or waiting; 0 sets no limit.",
            "Limits",
            "answers",
            ge=0,
        ),
    ] = 0
    requests_per_minute_per_key: Annotated[
        int,
        Option(
            "Most requests of one API key in a minute; 0 sets no limit.", "Limits", "requests", ge=0
        ),
    ] = 0
    max_prefix_share_per_key: Annotated[
        float,
        Option(
            "Largest share of named prefixes and their pages that one user key may hold when "
            "several keys exist.",
            "Limits",
            gt=0,
            le=1,
            is_tuning=True,
        ),
    ] = 0.5
    max_connections: Annotated[
        int,
        Option(
            "Most open connections; a further one closes the one that has been idle longest.",
            "Limits",
            "connections",
            ge=1,
        ),
    ] = 1_000
    max_connections_per_address: Annotated[
        int,
        Option(
            "Most open connections from one address; works like max-connections.",
            "Limits",
            "connections",
            ge=1,
            is_tuning=True,
        ),
    ] = 500
    header_timeout: Annotated[
        float,
        Option(
            "Time for a request's headers to arrive.", "Limits", "seconds", gt=0, is_tuning=True
        ),
    ] = 10.0
    body_timeout: Annotated[
        float,
        Option("Time for a request's body to arrive.", "Limits", "seconds", gt=0, is_tuning=True),
    ] = 30.0
    write_timeout: Annotated[
        float,
        Option(
            "Disconnect a client that has not read its answer for this long.",
            "Limits",
            "seconds",
            gt=0,
            is_tuning=True,
        ),
    ] = 20.0
    log_level: Annotated[
        str,
        Option(
            "Log level.",
            "Log",
            choices=("debug", "info", "warning", "error"),
            is_basic=True,
        ),
    ] = "info"

    def check_together(self) -> None:
        keep_alive_seconds(self.keep_alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(Options):
    """A model's table of the configuration file, besides the engine's options.

    Raises InvalidConfig.
    """

    aliases: Annotated[tuple[str, ...], Option("Other names of the model.", "Model")] = ()
    keep_alive: Annotated[
        str | None,
        Option("As --keep-alive, for this model.", "Model", "duration", default="--keep-alive"),
    ] = None
    preload: Annotated[bool, Option("Load it when the server starts, and keep it.", "Model")] = (
        False
    )

    def check_together(self) -> None:
        if self.keep_alive is not None:
            keep_alive_seconds(self.keep_alive)
