"""Brings the ranks of an engine together, from its options."""

from __future__ import annotations

import importlib.metadata

from mlxserve.config import EngineConfig
from mlxserve.distributed.environment import Split, lead_address, own_rank
from mlxserve.distributed.lead import Lead
from mlxserve.distributed.local import LocalRanks
from mlxserve.distributed.meeting import Hello, wait_for_workers
from mlxserve.errors import InvalidConfig
from mlxserve.hub.files import ModelFiles
from mlxserve.option import given_options, options_of
from mlxserve.version import __version__

# Options that the ranks of an engine need not share.
_OF_EACH_RANK = {
    "model",
    "revision",
    "gpu_memory_utilization",
    "wired_limit",
    "hostfile",
    "trace",
    "disable_log_stats",
    "log_stats_interval",
    "disk_cache_dir",
}


def split_of(config: EngineConfig) -> Split:
    return Split.LAYERS if config.pipeline_parallel_size > 1 else Split.HEADS


def gather(config: EngineConfig, files: ModelFiles) -> Lead:
    """Rank 0's connections to the other ranks, once all have come.

    Without a launcher they are started on this machine. Raises InvalidConfig, EngineStopped.
    """
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
    return Lead(channels, config.distributed_timeout_seconds, local)


def hello_of(config: EngineConfig, files: ModelFiles, rank: int) -> Hello:
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    options = {
        option.name: str(getattr(owner, option.name))
        for owner in (config, config.scheduler)
        for option in options_of(type(owner))
        if hasattr(owner, option.name) and option.name not in _OF_EACH_RANK
    }
    return Hello(rank, {**versions, "mlxserve": __version__}, files.fingerprint, options)
