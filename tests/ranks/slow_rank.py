"""What rank 0 plans, as on a Mac, where another rank takes a second longer for each step.

`steps` are (rows, work, work that it may have), the latter in units of the step that was measured at load.
`python -m tests.ranks.slow_rank FOLDER OPTIONS`, started by a launcher as every rank, prints it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from mlxserve.system import machine

machine.import_mlx_lm()

from mlxserve import SamplingParams, engine_part  # noqa: E402
from mlxserve.core.config import EngineConfig  # noqa: E402
from mlxserve.core.forward_work import WorkBudget  # noqa: E402
from mlxserve.engine.step_time_model import StepTimeModel  # noqa: E402
from mlxserve.model.runner import ModelRunner  # noqa: E402
from mlxserve.model.step_peak import StepPeak  # noqa: E402
from mlxserve.ranks.environment import own_rank  # noqa: E402
from mlxserve.ranks.run import build_text_model_of_ranks, run_worker  # noqa: E402
from tests.as_a_mac import answer_as_a_mac  # noqa: E402

SECONDS = 1.25  # more than a step may take
NUM_ROWS = 64  # of a step that nothing bounds
PAGE_SIZE = 16


def _delay() -> None:
    """Every step of this rank, which the others wait for."""
    compute = ModelRunner.compute

    def slowly(self: ModelRunner, arrays: Any) -> None:
        time.sleep(SECONDS)
        compute(self, arrays)

    setattr(ModelRunner, "compute", slowly)  # noqa: B010  # mypy knows methods


def _observe(found: dict[str, Any]) -> None:
    measure, launch, budget_of = (
        engine_part.measure_step,
        ModelRunner.launch,
        StepTimeModel.work_budget,
    )
    budgets: list[WorkBudget | None] = []

    def measured(*inputs: Any, **options: Any) -> StepPeak:
        step = measure(*inputs, **options)
        found.update(start=step.start, rows=step.num_measured, seconds=step.seconds)
        return step

    def budget(self: StepTimeModel) -> WorkBudget | None:
        budgets.append(budget_of(self))
        return budgets[-1]

    def launched(self: ModelRunner, chunks: Any, *inputs: Any) -> Any:
        if budgets and (now := budgets[-1]) is not None:
            work = sum(now.forward.of_chunk(chunk.start, chunk.length) for chunk in chunks)
            whole = now.forward.of_chunk(found["start"], found["rows"])
            rows = sum(chunk.length for chunk in chunks)
            found.setdefault("steps", []).append([rows, work / whole, now.amount / whole])
        return launch(self, chunks, *inputs)

    setattr(engine_part, "measure_step", measured)  # noqa: B010
    setattr(StepTimeModel, "work_budget", budget)  # noqa: B010
    setattr(ModelRunner, "launch", launched)  # noqa: B010


async def _answer(config: EngineConfig) -> None:
    chat = build_text_model_of_ranks(config)
    try:
        stream = await chat.writer.submit_all(
            [list(range(2 * NUM_ROWS))], SamplingParams(max_tokens=1)
        )
        await stream.whole()
    finally:
        chat.close()


def main(folder: Path, options: dict[str, Any]) -> None:
    answer_as_a_mac()
    config = EngineConfig().with_options(
        model=str(folder),
        num_pages=40,
        page_size=PAGE_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=NUM_ROWS,
        disable_log_stats=True,
        distributed_timeout_seconds=120.0,
        **options,
    )
    if own_rank():
        _delay()
        run_worker(config)
    found: dict[str, Any] = {}
    _observe(found)
    asyncio.run(_answer(config))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
