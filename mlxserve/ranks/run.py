"""Starts the ranks of an engine: rank 0 builds the server, every other rank follows it."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
import threading
from functools import partial
from typing import NoReturn

from mlxserve.build import build_text_model, open_rank_records
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, MlxServeError, in_one_line
from mlxserve.core.option import given_options, options_of
from mlxserve.core.version import __version__
from mlxserve.engine_part import build_part
from mlxserve.helpers.fair_executor import FairExecutor
from mlxserve.hub.adapter_files import find_adapters
from mlxserve.hub.files import ModelFiles, find_model, text_config
from mlxserve.hub.kv_shapes import num_layers
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.split_by_layers import check_layers
from mlxserve.ranks.environment import lead_address, own_rank, ranks_on_this_machine, starts_again
from mlxserve.ranks.follower import WORKER_FAILED, Follower
from mlxserve.ranks.handshake import Hello, report_to_lead, wait_for_workers
from mlxserve.ranks.lead import Lead
from mlxserve.ranks.local import LocalRanks, remove_hostfile
from mlxserve.ranks.wire import FrameKind
from mlxserve.ranks.worker import RankWorker
from mlxserve.system.terminal_text import escaped_lines

log = logging.getLogger("mlxserve.ranks")

# Options that the ranks of an engine need not share.
_OF_EACH_RANK = {
    "model",
    "revision",
    "gpu_memory_utilization",
    "wired_limit",
    "hostfile",
    "max_rank_restarts",
    "trace",
    "disable_log_stats",
    "log_stats_interval",
    "disk_cache_dir",
    "disk_cache_size",
    "page_store",  # perhaps with a password; all must have one
    "draft_model",  # rank 0 has all of it
}


def build_text_model_of_ranks(
    config: EngineConfig,
    files: ModelFiles | None = None,
    *,
    executor: FairExecutor | None = None,
    memory_limit: int | None = None,
) -> TextModel:
    """Call `build_text_model` as rank 0 of the configured number of ranks. Raises MlxServeError."""
    others = partial(connect, config) if config.num_ranks > 1 else None
    return build_text_model(config, files, others, executor=executor, memory_limit=memory_limit)


def join_group(config: EngineConfig) -> RankGroup:
    """Join the group, on the thread that computes. Raises EngineStopped."""
    return RankGroup(
        Split.LAYERS if config.pipeline_parallel_size > 1 else Split.HEADS,
        config.num_ranks,
        config.distributed_backend,
        num_on_this_machine=ranks_on_this_machine(),
    )


def connect(config: EngineConfig, files: ModelFiles) -> Lead:
    """Return rank 0's connections to the other ranks, once all have come.

    Without a launcher they are started on this machine. Raises InvalidConfig, UnsupportedModel,
    EngineStopped.
    """
    layers = num_layers(text_config(files.config))
    # No rank waits for another before this.
    if layers is not None:
        check_layers(layers, config.pipeline_parallel_size, files.name)
    local = None
    if own_rank() is None:
        if config.hostfile is not None:
            raise InvalidConfig(
                f"hostfile={config.hostfile}: start this script on every machine by `mlx.launch "
                f"--hostfile {config.hostfile}`; only `mlxserve serve` does so itself.",
                option="hostfile",
            )
        local = LocalRanks.start(config.num_ranks, given_options(config))
    try:
        channels = wait_for_workers(
            lead_address(config.master_port),
            config.num_ranks,
            hello_of(config, files, 0),
            config.distributed_timeout_seconds,
        )
    except BaseException:
        if local is not None:
            local.kill()
        raise
    return Lead(
        channels,
        config.distributed_timeout_seconds,
        partial(join_group, config),
        local,
        starts_again=starts_again(),
    )


def hello_of(config: EngineConfig, files: ModelFiles, rank: int) -> Hello:
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    options = {
        option.name: str(getattr(owner, option.name))
        for owner in (config, config.scheduler)
        for option in options_of(type(owner))
        if hasattr(owner, option.name) and option.name not in _OF_EACH_RANK
    }
    options["adapter"] = ", ".join(
        f"{each.name} ({each.digest})" for each in find_adapters(config.adapters)
    )
    return Hello(rank, {**versions, "mlxserve": __version__}, files.fingerprint, options)


def run_worker(config: EngineConfig) -> NoReturn:
    """Work until rank 0 closes the connection; then end the process.

    Not by SystemExit: a thread of mlx may be waiting for another rank.
    """
    if threading.current_thread() is threading.main_thread():
        # Rank 0 gets them as well; it ends once its answers have, and then so does this rank.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    rank, follower = own_rank(), None
    assert rank, "rank 0 does not follow"
    try:
        files = find_model(config.model, config.revision)
        hello = hello_of(config, files, rank)
        address = lead_address(config.master_port)
        follower = Follower(report_to_lead(address, hello, config.distributed_timeout_seconds))
        group = join_group(config)
        follower.join(group)
        part = build_part(config, files, group)
        worker = RankWorker(group, follower, part.loaded, part.kv, part.device_memory, part.windows)
        send = partial(follower.send, FrameKind.DISK)
        worker.keep(open_rank_records(config, files, part, worker, send, follower.call_soon))
        worker.run()
    except BaseException as error:
        log.debug("Rank %d has failed", rank, exc_info=error)
        text = str(error)
        if not isinstance(error, MlxServeError):
            text = f"{type(error).__name__}: {in_one_line(error)}"
        if follower is None or not follower.fail(text):
            print(f"error: rank {rank}: {escaped_lines(text)}", file=sys.stderr, flush=True)  # noqa: T201
        # Rank 0 may be gone, though it could be told.
        remove_hostfile()
        os._exit(WORKER_FAILED)
    os._exit(0)
