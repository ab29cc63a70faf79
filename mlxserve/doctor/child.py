"""The tasks of `children.run_child`: each prints one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from mlxserve.system import machine


def fences(size: str = "thorough") -> list[dict[str, Any]]:
    """Run the self-test of in-place writes and its control in every dtype.

    size: may be "quick"
    """
    machine.prepare()
    from metal_kernels.kernels import on_metal
    from metal_kernels.metal import DTYPES
    from metal_kernels.selftest import QUICK, QUICK_Q8, every_thorough_load, prove

    quick = [*(replace(QUICK, dtype=dtype) for dtype in DTYPES), QUICK_Q8]
    loads = quick if size == "quick" else every_thorough_load()

    return [
        {
            "dtype": proof.load.label,
            "with_fences": proof.with_fences,
            "without_fences": proof.without_fences,
        }
        for proof in prove(on_metal, loads)
    ]


def model_speeds(task: str, model: str) -> Any:
    """Call a function of `model_speeds`."""
    machine.import_mlx_lm()
    from mlxserve.doctor import answer_times
    from mlxserve.doctor import model_speeds as tasks

    functions = {
        "times": answer_times.times,
        "chosen": tasks.chosen,
        "ours": tasks.ours,
        "host": tasks.host,
        "rows": tasks.rows,
        "theirs": tasks.theirs,
    }
    return functions[task](model)


def attention() -> list[dict[str, Any]]:
    """Return the fields of attention's `Measurement`s."""
    machine.prepare()
    from mlxserve.doctor.attention_speeds import attention_speeds

    return [asdict(measurement) for measurement in attention_speeds()]


TASKS: dict[str, Callable[..., Any]] = {
    "fences": fences,
    "attention": attention,
    "model": model_speeds,
}


def main(task: str, *arguments: str) -> None:
    print(json.dumps(TASKS[task](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
