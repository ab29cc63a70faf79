"""One rank of a pair that runs architecture after architecture, because starting processes takes seconds.

`run_cases`, with MLX_RANK and MLX_HOSTFILE in two processes, reads cases from stdin and prints what came of
each, one JSON line each:

    {"name": "llama", "split": "heads", "port": 4711}
    {"answers": {...}}                         rank 0; of the other one {"answers": {}}
    {"refused": "...", "is_early": true}       early: before the first collective of the model
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from typing import Any

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import MlxServeError
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.model.attention import AttentionChoice, choose_attention
from mlxserve.model.load import keep_part, prepare
from mlxserve.model.rank_group import RankGroup, Split
from mlxserve.model.runner import ModelRunner
from mlxserve.ranks.environment import own_rank
from mlxserve.ranks.follower import Follower
from mlxserve.ranks.handshake import Hello, report_to_lead, wait_for_workers
from mlxserve.ranks.lead import Lead
from mlxserve.ranks.worker import RankWorker
from mlxserve.request import Request
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import machine
from tests.model.test_every_architecture import PAGE_SIZE, PROMPTS, build

SIZE = 2
SECONDS = 60.0
NUM_PAGES = 40
_LARGER, _SMALLER = 56, 7  # too few for all prompts at once
_NUM_STATE_SLOTS = 64
_NUM_TOKENS = 8
_GREEDY = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
_SEED = 5
# With 5, rounding decides one of the tokens: logits differ by 1e-6, and so does the order of sums.
_OTHER_SEEDS = {"qwen3_5_moe": 6}

Answers = dict[str, Any]


def answers(choice: AttentionChoice, lead: Lead | None = None) -> Answers:
    """Of an engine over a model, or over rank 0's part of it. Raises AssertionError."""
    loaded = choice.loaded
    kv = KVPool(loaded.layers, NUM_PAGES, PAGE_SIZE, choice.backends)
    config = SchedulerConfig(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=48)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    ends = [StateSlots(_NUM_STATE_SLOTS, pool)] if loaded.has_states else []
    scheduler = Scheduler(config, pool, ends=ends)
    engine = Engine(
        scheduler, ModelRunner(loaded, kv, workers=lead), StepTimeModel(None), workers=lead
    )
    logprobs: list[float] = []
    seeded = SamplingParams(
        max_tokens=_NUM_TOKENS,
        temperature=0.8,
        top_p=0.9,
        seed=_OTHER_SEEDS.get(loaded.name, _SEED),
        repetition_penalty=1.2,
        ignore_eos=True,
    )

    def ask(params: SamplingParams, sizes: dict[int, int] | None = None) -> list[list[int]]:
        """`sizes`: numbers of pages, by the step before which the cache is given them."""
        asked = [Request(str(i), ids, params) for i, ids in enumerate(PROMPTS)]
        live, count = engine.add_all(asked), 0
        while engine.has_work:
            if count in (sizes or {}):
                engine.resize_cache((sizes or {})[count])
            for output in engine.step():
                if output.request_id == "0":
                    logprobs.extend(item.logprob for item in output.logprobs)
            count += 1
        engine.check()
        return [list(request.token_ids[request.num_prompt :]) for request in live]

    found: Answers = {"together": ask(_GREEDY), "logprobs": list(logprobs)}
    before = engine.monitor.stats().scheduler.prefix_hits
    found["from the cache"] = ask(_GREEDY)
    assert engine.monitor.stats().scheduler.prefix_hits - before >= 3 * PAGE_SIZE
    found["seeded"] = ask(seeded)
    found["resized"] = ask(_GREEDY, {3: _LARGER, 6: _SMALLER})
    found["num_preemptions"] = engine.monitor.stats().scheduler.num_preemptions
    return found


def _part(name: str, group: RankGroup) -> tuple[Any, dict[str, Any]]:
    model, config = build(name)
    keep_part(model, group, name, str(config["model_type"]), machine.memory().total)
    return model, config


class _Rank:
    """This process, which is in one group for all cases."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._joined: RankGroup | None = None

    def run(self, name: str, split: str, port: int) -> Answers | None:
        """The answers, or None where a refusal was printed."""
        address, hello = ("127.0.0.1", port), Hello(self._rank, {}, name, {})
        if self._rank:
            channel = report_to_lead(address, hello, SECONDS)
            follower = Follower(channel)
            group = self._group(split)
            follower.join(group)
            if (choice := self._chosen(name, group)) is not None:
                kv = KVPool(choice.loaded.layers, NUM_PAGES, PAGE_SIZE, choice.backends)
                RankWorker(group, follower, choice.loaded, kv).run()
            else:
                list(follower.frames())
            channel.close()
            return None if choice is None else {}
        channels = wait_for_workers(address, SIZE, hello, SECONDS)
        lead = Lead(channels, SECONDS, partial(self._group, split))
        lead.attach(_say_loss, lambda: 0.0)
        choice = self._chosen(name, lead.join())
        found = None if choice is None else answers(choice, lead)
        lead.close()
        return found

    def _group(self, split: str) -> RankGroup:
        self._joined = self._joined or RankGroup(Split(split), SIZE, "ring")
        group = copy.copy(self._joined)
        group.split = Split(split)
        return group

    def _chosen(self, name: str, group: RankGroup) -> AttentionChoice | None:
        is_early = True
        try:
            model, config = _part(name, group)
            is_early = False
            return choose_attention("auto", prepare(model, config, name, group))
        except MlxServeError as error:
            print(json.dumps({"refused": str(error), "is_early": is_early}), flush=True)
            return None


def _say_loss(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)


def run_cases() -> None:
    rank = own_rank()
    assert rank is not None, "MLX_RANK says which rank it is"
    here = _Rank(rank)
    for line in sys.stdin:
        found = here.run(**json.loads(line))
        if found is not None:
            print(json.dumps({"answers": found}), flush=True)
