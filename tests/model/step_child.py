"""Loads the included model and computes a step of it, as on the platform that it is given.

Prints what that changed in mlx and in mlx-lm's modules, what it imported, and the sampled token.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, cache, qwen3, switch_layers

from mlxserve.cache.kv import KVPool
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.files import find_model
from mlxserve.model.attention import choose_attention
from mlxserve.model.load import load
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, as_page_table

PLACES = (mx, mx.fast, nn, nn.layers.activations, base, cache, qwen3, switch_layers)
OURS = ("metal_kernels.x86", "mlxserve.model.activations")


def attributes() -> dict[str, Any]:
    """Of these modules and of their classes."""
    found: dict[str, Any] = {}
    for place in PLACES:
        kinds = [kind for kind in vars(place).values() if isinstance(kind, type)]
        for owner in (place, *kinds):
            found |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items()}
    return found


def step(*, is_metal: bool) -> int:
    """The token that follows a prompt of 40."""
    loaded = load(find_model(None), is_metal=is_metal, memory_limit=1 << 40)
    loaded, backends, _ = choose_attention("auto", loaded)
    runner = ModelRunner(loaded, KVPool(loaded.layers, 8, 32, backends))
    request = LiveRequest(Request("a", list(range(40)), SamplingParams(temperature=0)))
    pending = runner.launch([Chunk(request, 0, 40, as_page_table([0, 1]), samples=True)])
    runner.start(pending)
    [sampled] = runner.collect(pending)
    assert sampled is not None
    return sampled.token_id


if __name__ == "__main__":
    sys.platform = sys.argv[1]
    before = attributes()
    token = step(is_metal=sys.platform == "darwin")
    changed = [name for name, value in attributes().items() if before.get(name) is not value]
    imported = [name for name in sys.modules if name.startswith(OURS)]
    print(json.dumps({"changed": sorted(changed), "imported": imported, "token": token}))
