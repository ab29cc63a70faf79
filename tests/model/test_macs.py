"""Nothing that a Linux CPU needs touches a Mac: a step with a Mac's answers, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

ATTENTION = "mlx_lm.models.qwen3.scaled_dot_product_attention"


def step_on(platform: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.step_child", platform],
        check=True,
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def on_a_mac() -> dict[str, Any]:
    return step_on("darwin")


def test_a_mac_imports_nothing_of_x86(on_a_mac: dict[str, Any]) -> None:
    assert on_a_mac["imported"] == []


def test_on_a_mac_attention_is_all_that_is_replaced(on_a_mac: dict[str, Any]) -> None:
    assert on_a_mac["changed"] == [ATTENTION]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac is compared with a Linux CPU")
def test_a_linux_cpu_replaces_activations_as_well(on_a_mac: dict[str, Any]) -> None:
    found = step_on(sys.platform)
    activations = {"mlx.nn.silu", "mlx.nn.gelu_approx", "mlx_lm.models.qwen3.swiglu"}
    assert set(found["changed"]) == {ATTENTION, *activations}
    assert "metal_kernels.x86.backend" in found["imported"]
    assert found["token"] == on_a_mac["token"]
