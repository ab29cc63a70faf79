"""A pytest plugin: this machine answers what a Mac with 8 GB does.

    python -m pytest -p tests.as_a_mac FOLDER

The engine then keeps weights as they are stored, measures a step at load, makes steps of 512 rows, evaluates
prompts layer by layer, bounds them by their multiply-adds, and has little memory. Kernels stay those of this
machine, and so do processes that a test starts.
"""

from __future__ import annotations

from functools import wraps

import pytest

from mlxserve.system import machine

MEMORY = 8 << 30
WORKING_SET = MEMORY * 2 // 3  # as macOS reports it


def pytest_configure(config: pytest.Config) -> None:
    answer_as_a_mac()


def answer_as_a_mac() -> None:
    """For the life of this process."""
    machine.is_metal = lambda: True
    machine.total_memory = wraps(machine.total_memory.__wrapped__)(lambda: MEMORY)
    machine.working_set = lambda: WORKING_SET
