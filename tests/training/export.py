"""Export a trained network to a folder that mlx-lm loads, and check that both agree."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.training.network import Network
from tests.training.tokenizer import END, END_OF_TEXT, load_tokenizer

PARITY_TOLERANCE = 1e-3  # largest allowed difference of a logit, both in float32


def export(network: Network, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, generation_config.json and model.safetensors next to the tokenizer."""
    tokenizer = load_tokenizer(folder)
    end, padding = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    call = tokenizer.token_to_id("<tool_call>")  # which the engine allows where tools are given
    ids = {"eos_token_id": end, "pad_token_id": padding}
    precision = {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", {**network.shape.config(), **ids, **precision})
    sampling = {"do_sample": False, "temperature": 0.0, "max_new_tokens": 256}
    suppressed = {"suppress_tokens": [call]}
    _write_json(folder / "generation_config.json", {**ids, **sampling, **suppressed})
    weights = {name: value.to(dtype).contiguous() for name, value in network.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "mlx"})
    path.chmod(0o644)  # the library makes it readable by its owner only


def parity(network: Network, folder: Path, num_tokens: int = 128, seed: int = 0) -> float:
    """The largest logit difference between `network` and mlx-lm's model in `folder`.

    Both use the exported weights in float32, on `num_tokens` random tokens.
    """
    from mlxserve.system.machine import prepare

    prepare()
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model
    from safetensors.torch import load_file

    rounded = Network(network.shape)
    exported = load_file(folder / "model.safetensors")
    rounded.load_state_dict({name: value.float() for name, value in exported.items()})
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, network.shape.vocab_size, (1, num_tokens), generator=generator)
    with torch.no_grad():
        ours = rounded(tokens).numpy()
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array(tokens.numpy())))
    return float(np.abs(ours - theirs).max())


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
