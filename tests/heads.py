"""Checkpoints with a head for multi-token prediction, under the names that their publishers use.

The head of a checkpoint written here is right: all layers of the model but the last ones add nothing, and the head's
layer is a copy of those, whose projection takes the embedding alone. So its hidden state is the model's own, and each
guess is the token that the model samples, greedily or not.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import EngineConfig, SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.hub.embedded import model_path
from mlxserve.hub.files import check_folder
from mlxserve.model.attention import choose_attention
from mlxserve.model.drafting.draft_pages import DraftPages
from mlxserve.model.drafting.head_weights import find_head
from mlxserve.model.drafting.load import PagedDrafting, load_drafting
from mlxserve.model.load import LoadedModel, load
from mlxserve.model.runner import ModelRunner
from mlxserve.request import LiveRequest, Request
from mlxserve.scheduler.drafts import DeviceDrafts
from mlxserve.scheduler.scheduler import Scheduler
from tests.conftest import vocabulary_size

Weights = dict[str, mx.array]

SIZE = 64
_COMMON = {
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 32,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
}
_LATENT = {
    **_ROUTED,
    "kv_lora_rank": 256,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, **_EXPERTS},
    "deepseek_v3": _LATENT,
    "glm4_moe": {**_ROUTED, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "glm4_moe_lite": {**_LATENT, "partial_rotary_factor": 1.0},
    "mimo": {"num_nextn_predict_layers": 1, "hidden_size": 256},
    "nemotron_h": {
        **_ROUTED,
        "hybrid_override_pattern": ["M", "*", "E"],
        "num_hidden_layers": 3,
        "mtp_hybrid_override_pattern": "*E",
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "step3p5": {
        "num_attention_groups": 2,
        "rope_theta": [10000.0, 5000.0, 5000.0],
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "partial_rotary_factors": [0.5, 1.0, 1.0],
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "0",
        "num_nextn_predict_layers": 1,
    },
}
# Of a head: (embedding's norm, hidden state's norm, projection, last norm), as published.
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_INNER = {"qwen3_5": "language_model.model", "qwen3_5_moe": "language_model.model"}
_INNER["nemotron_h"] = "backbone"
MINUS_ONE = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "step3p5")
KINDS = tuple(CONFIGS)


def build(kind: str, seed: int = 1, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return (a model whose layers but the last ones add nothing, its config)."""
    vocabulary = vocabulary_size()
    config = {**_COMMON, "model_type": kind, "vocab_size": vocabulary, **CONFIGS[kind], **changes}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(seed)

    def drawn(array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape)
        return noise * 0.3 + 1.0 if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    weights = dict(tree_flatten(tree_map(drawn, model.parameters())))
    ends = re.compile(r".*layers\.0\..*(o_proj|out_proj|down_proj)\.weight")
    for name, array in weights.items():
        if ends.fullmatch(name):
            weights[name] = mx.zeros_like(array)
        elif name.endswith(("embed_tokens.weight", "embeddings.weight")):
            # A norm with weights of one leaves these rows as they are.
            weights[name] = array / mx.sqrt(mx.mean(array**2, axis=-1, keepdims=True))
        elif name.endswith("lm_head.weight"):
            weights[name] = array * 3
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model, config


class Parts(NamedTuple):
    """The modules of a head beside its layer: weights of norms, and of the projection (size, 2 * size)."""

    embedding_norm: mx.array
    hidden_norm: mx.array
    projection: mx.array
    final_norm: mx.array


def right_parts(kind: str, weights: Mapping[str, mx.array]) -> Parts:
    """Return those that give the layer the token's embedding, and the model's head what it expects."""
    norm = weights[
        f"{_INNER.get(kind, 'model')}.{'norm_f' if kind == 'nemotron_h' else 'norm'}.weight"
    ]
    size = norm.shape[0]
    halves = [mx.eye(size), mx.zeros((size, size))]
    if kind == "mimo":
        halves.reverse()
    ones = mx.ones((size,))
    return Parts(ones, ones, mx.concatenate(halves, axis=1), norm)


def random_parts(size: int, seed: int) -> Parts:
    mx.random.seed(seed)
    norms = [1 + 0.3 * mx.random.normal((size,)) for _ in range(3)]
    projection = mx.random.normal((size, 2 * size)) * size**-0.5
    return Parts(norms[0], norms[1], projection, norms[2])


def head_of(
    kind: str,
    weights: Mapping[str, mx.array],
    parts: Parts | None = None,
    *,
    is_published: bool = True,
) -> Weights:
    """Return a head by the names and in the layout of its publisher.

    weights: of a model whose layers but the first one are the head's
    parts: by default those of a right head
    is_published: in its publisher's layout, not in that of mlx-lm
    """
    parts = parts or right_parts(kind, weights)
    inner = _INNER.get(kind, "model")
    prefix, in_layer, names = _names(kind)
    layer = {
        name.partition("layers.")[2]: array
        for name, array in weights.items()
        if name.startswith(f"{inner}.layers.") and not name.startswith(f"{inner}.layers.0.")
    }
    found: Weights = {}
    for name, array in layer.items():
        number, _, rest = name.partition(".")
        found[f"{prefix}{in_layer.format(int(number) - 1)}{rest}"] = array
    if is_published:
        found = _as_published(kind, found)
    first, last = ("layers.0.", "layers.1.") if kind == "nemotron_h" else ("", "")
    for name, array in zip(names, parts, strict=True):
        where = last if name == "final_layernorm" else first
        found[f"{prefix}{where}{name}.weight"] = array
    if kind in MINUS_ONE and is_published:
        norms = {name for name in found if name.endswith("norm.weight")}
        norms |= {name for name in found if "pre_fc_norm" in name}
        found |= {name: found[name] - 1 for name in norms}
    return found


def _names(kind: str) -> tuple[str, str, tuple[str, ...]]:
    """Return (prefix of a head's names, what precedes those of its layers, names of its other modules)."""
    if kind.startswith("qwen"):
        return "mtp.", "layers.{}.", _QWEN
    if kind == "nemotron_h":
        return "mtp.", "layers.{}.", (*_DEEPSEEK[:3], "final_layernorm")
    if kind == "mimo":
        return "model.mtp_layers.0.", "", _MIMO
    return "model.layers.2.", "", _DEEPSEEK


def _as_published(kind: str, weights: Weights) -> Weights:
    """Undo what mlx-lm does to published weights."""
    found: Weights = {}
    for name, array in weights.items():
        if kind == "qwen3_5_moe" and ".switch_mlp." in name:
            if ".up_proj" in name:
                continue
            joined = "down_proj" if ".down_proj" in name else "gate_up_proj"
            if joined == "gate_up_proj":
                array = mx.concatenate([array, weights[name.replace("gate_", "up_")]], axis=1)
            found[f"{name.partition('.switch_mlp.')[0]}.experts.{joined}"] = array
        elif ".switch_mlp." in name:
            before, _, rest = name.partition(".switch_mlp.")
            rest = rest.replace("fc1", "up_proj").replace("fc2", "down_proj")
            for number, expert in enumerate(array):
                found[f"{before}.experts.{number}.{rest}"] = expert
        elif name.endswith("embed_q.weight"):
            other = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(-1, -2), other], axis=1)
            found[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            found[name] = array
    return found


def write(
    folder: Path,
    kind: str,
    *,
    noise: float = 0.0,
    head: Weights | None = None,
    seed: int = 1,
    **changes: Any,
) -> Path:
    """Write a model with a head as its publisher would, and return the folder.

    noise: on the matrices of the head, so that some of its guesses are wrong
    head: in place of the right one; empty for none
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, config = build(kind, seed, **changes)
    weights = dict(tree_flatten(model.parameters()))
    if head is None:
        head = head_of(kind, weights)
    if noise:
        mx.random.seed(11)
        head = {
            name: array * (1 + noise * mx.random.normal(array.shape)) if array.ndim > 1 else array
            for name, array in head.items()
        }
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    if head:
        mx.save_safetensors(str(folder / "model-mtp.safetensors"), head, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder


TEXT = [draw % 500 + 40 for draw in range(7, 60_000, 1_009)]  # for the probe
MEMORY = 1 << 34
PAGE, NUM_PAGES = 16, 40


def loaded(folder: Path) -> LoadedModel:
    return load(check_folder(folder, folder.name), is_metal=False, memory_limit=MEMORY)


def drafting_of(folder: Path, target: LoadedModel, *, is_metal: bool = False) -> PagedDrafting:
    """Load the head in a folder for a model."""
    files = check_folder(folder, folder.name)
    return load_drafting(
        EngineConfig(),
        find_head(files, target.config) or files,
        target,
        lambda: TEXT,
        is_metal=is_metal,
        memory_limit=MEMORY,
    )


class Drafted:
    """An engine over a model in memory, with a head."""

    def __init__(self, target: LoadedModel, drafting: PagedDrafting, max_tokens: int) -> None:
        """max_tokens: of a draft; with 0 the head only follows"""
        choice = choose_attention("auto", target)
        kv = KVPool(target.layers, NUM_PAGES, PAGE, choice.backends)
        own = KVPool(drafting.loaded.layers, NUM_PAGES, PAGE, drafting.backends)
        self.pages = DraftPages(own)
        self.drafter = drafting.source(
            drafting.loaded, self.pages, vocab_size=target.vocab_size, max_rows=64
        )
        pool = PagePool(NUM_PAGES, PAGE)
        ends = [StateSlots(64, pool)] if target.states else []
        config = SchedulerConfig(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=24)
        drafts = DeviceDrafts(max_tokens) if max_tokens else None
        runner = ModelRunner(choice.loaded, kv, drafter=self.drafter)
        scheduler = Scheduler(config, pool, None, drafts, ends=ends)
        self.engine = Engine(scheduler, runner, StepTimeModel(None))

    def run(self, *prompts: list[int], max_tokens: int = 50) -> list[LiveRequest]:
        """Answer prompts greedily, together."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        added = self.engine.add_all([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
        self.tables = {}
        while self.engine.has_work:
            self.engine.step()
            # A request that has ended has no pages; their content is there until they are used again.
            self.tables |= {each: each.page_table for each in added if len(each.page_table)}
        self.engine.check()
        return added

    def rows(self, request: LiveRequest, num_pages: int) -> list[mx.array]:
        """Return the head's keys and values on a request's first pages."""
        units = self.units(request, num_pages)
        return [mx.array(np.frombuffer(unit[:-4], np.float32)) for unit in units]

    def units(self, request: LiveRequest, num_pages: int) -> list[bytes]:
        return self.pages.read_units(list(self.tables[request])[:num_pages])
