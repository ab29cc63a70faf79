"""Answers about images of a model on ranks: alone, from the cache, together and after preemptions.

python -m tests.ranks.seeing FOLDER OPTIONS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from mlxserve import LLM, SamplingParams
from mlxserve.core.errors import InvalidParameter
from tests.model.small_vision import Said, conversation, image
from tests.ranks.child import print_found, run_child
from tests.together import begun_together

NUM_TOKENS = 12
PAGE = 16
_PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
_A, _B, _WIDE = image(1), image(2), image(3, 60, 200)
QUESTIONS: tuple[Said, ...] = (
    ("What is this? ", _A, " Say it in a few words."),
    ("What is this? ", _B, " Say it in a few words."),
    ("Compare ", _WIDE, " and ", _A, " now."),
    (_B, "Describe it."),
    ("Tell me about pages, prefixes and the cache.",),
)
Found: TypeAlias = dict[str, Any]


def _ask(llm: LLM, questions: Sequence[Said]) -> list[Any]:
    asked = [conversation(said) for said in questions]
    outputs = llm.chat(asked, _PARAMS, use_tqdm=False)
    llm.check()
    return outputs


def _tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def seen(folder: str, **options: Any) -> Found:
    """In this process, which must be the only rank, or be a process of its own."""
    given: dict[str, Any] = {
        "num_pages": 5,  # two short questions fit, and their answers do not
        "page_size": PAGE,
        "max_model_len": 5 * PAGE,
        "max_num_seqs": 5,
        "num_state_slots": 32,
        "max_num_batched_tokens": 40,
        "disable_log_stats": True,
        **options,
    }
    with LLM(folder, **given) as llm:
        try:
            _ask(llm, QUESTIONS[:1])
        except InvalidParameter as error:
            return {"refused": str(error)}
        assert llm.reset_prefix_cache()
        alone, cached = [], []
        num_cached = 0
        for said in QUESTIONS:
            alone += _tokens(_ask(llm, [said]))
            again = _ask(llm, [said])
            cached += _tokens(again)
            num_cached += again[0].usage.cached_tokens
        with begun_together(len(QUESTIONS)):
            together = _tokens(_ask(llm, QUESTIONS))
        stats = llm.stats()
        return {
            "alone": alone,
            "cached": cached,
            "together": together,
            "num_cached": num_cached,
            "num_preemptions": stats.scheduler.num_preemptions,
            "num_encoded": stats.vision.num_computed,
            "num_drafted": stats.scheduler.drafted_tokens,
            "ranks": sorted(stats.ranks.num_frames),
        }


def seen_by_ranks(folder: str, **options: Any) -> Found:
    """In processes of their own."""
    found: Found = run_child("tests.ranks.seeing", folder, options)
    return found


if __name__ == "__main__":
    folder, options = map(json.loads, sys.argv[1:])
    print_found(seen(folder, **options))
