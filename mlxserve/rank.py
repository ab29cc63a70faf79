"""Be one of the other ranks of an engine: build this rank's part, and follow rank 0."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from mlxserve.build import build_part
from mlxserve.config import EngineConfig
from mlxserve.distributed.crew import Crew
from mlxserve.distributed.environment import lead_address, own_rank
from mlxserve.distributed.follower import WORKER_FAILED, Follower
from mlxserve.distributed.gathering import hello_of, split_of
from mlxserve.distributed.local import remove_hostfile
from mlxserve.distributed.meeting import report_to_lead
from mlxserve.distributed.worker import RankWorker
from mlxserve.errors import MlxServeError, in_one_line
from mlxserve.hub.files import find_model

log = logging.getLogger("mlxserve.distributed")


def run_worker(config: EngineConfig) -> NoReturn:
    """Until rank 0 closes; then the process ends.

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
        crew = Crew(split_of(config), config.num_ranks, config.distributed_backend)
        follower.join(crew)
        part = build_part(config, files, crew)
        RankWorker(crew, follower, part.loaded, part.kv, part.device_memory).run()
    except BaseException as error:
        log.debug("Rank %d has failed", rank, exc_info=error)
        text = str(error)
        if not isinstance(error, MlxServeError):
            text = f"{type(error).__name__}: {in_one_line(error)}"
        if follower is None or not follower.fail(text):
            print(f"error: rank {rank}: {text}", file=sys.stderr, flush=True)
        remove_hostfile()  # rank 0 may be gone, though it could be told
        os._exit(WORKER_FAILED)
    os._exit(0)
