"""How long a GGUF file of each kind of block takes to load for each GB, beside a folder for mlx of as many bytes.

Both become an mlx-lm model whose weights are as on a Mac. They are in the system's memory before they are
timed, so that disks do not count; each is loaded in a process of its own, whose memory is new, as a server's
is. They are loaded in turn, and the fastest of all rounds counts: other work on the machine only makes a round
slower.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxserve.bench.report import Figure, Report
from mlxserve.hub.gguf.blocks import REPACKINGS
from mlxserve.hub.gguf.config import model_config
from mlxserve.hub.gguf.reader import block_size, read_header
from mlxserve.hub.gguf.weights import load_gguf
from mlxserve.system import machine
from tests.hub.gguf.random_files import write_llama

KINDS = (*REPACKINGS, "F16")
WIDTH, INNER = 2048, 8192  # of Llama 3.2 1B; narrow tensors are one piece each, and use one thread
_VALUES = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER  # of a layer
_GB = 1e9

Load = tuple[
    float, float, float
]  # seconds for each GB, wall and of all CPUs, and GB that they become


def bench_loading(
    kinds: Sequence[str], *, megabytes: int, rounds: int, progress: Callable[[str], None]
) -> Report:
    figures = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            progress(f"{kind}: write")
            places = (
                write_llama(
                    Path(folder, "large.gguf"), kind, _num_layers(kind, megabytes), WIDTH, INNER
                ),
                write_folder(Path(folder, "mlx"), _num_layers("F16", megabytes)),
            )
            found: dict[Path, list[Load]] = {place: [] for place in places}
            for number in range(1, rounds + 1):
                progress(f"{kind}: round {number} of {rounds}")
                for place in places:
                    found[place].append(_in_a_process(place))
        figures += _figures(kind, *map(_fastest, found.values()))
    return Report("loading", {"megabytes": megabytes, "rounds": rounds}, tuple(figures))


def seconds_for_a_gb(place: Path) -> Load:
    """Load a GGUF file or a folder in this process."""
    machine.import_mlx_lm()
    from mlx_lm.utils import load_model

    file = place / "model.safetensors" if place.is_dir() else place
    file.read_bytes()
    for module in ("gguf", "mlx_lm.models.llama"):  # imports are not what is measured
        import_module(module)
    wall, of_cpus = time.perf_counter(), time.process_time()
    if place.is_dir():
        model, _ = load_model(place, lazy=False)
    else:
        header = read_header(place)
        model = load_gguf(header, model_config(header), is_metal=True)
    share = _GB / file.stat().st_size
    seconds = share * (time.perf_counter() - wall), share * (time.process_time() - of_cpus)
    return *seconds, share * sum(one.nbytes for _, one in tree_flatten(model.parameters())) / _GB


def _in_a_process(place: Path) -> Load:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(seconds_for_a_gb, place).result()


def _fastest(rounds: list[Load]) -> Load:
    walls, of_cpus, sizes = zip(*rounds, strict=True)
    return min(walls), min(of_cpus), sizes[0]


def write_folder(folder: Path, num_layers: int) -> Path:
    """The llama of `write_llama` as a folder for mlx, in float16."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    square = {f"self_attn.{one}_proj": (WIDTH, WIDTH) for one in "qkvo"}
    others = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    shapes = square | {f"mlp.{one}_proj": shape for one, shape in others.items()}
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,))
    arrays = {name: mx.random.normal(shape).astype(mx.float16) for name, shape in shapes.items()}
    arrays |= {name: mx.ones(shape, mx.float16) for name, shape in norms.items()}
    weights = {
        f"model.layers.{n}.{name}.weight": one
        for n in range(num_layers)
        for name, one in arrays.items()
    }
    weights["model.embed_tokens.weight"] = mx.ones((288, WIDTH), mx.float16)
    weights["model.norm.weight"] = mx.ones((WIDTH,), mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _num_layers(kind: str, megabytes: int) -> int:
    num_values, nbytes = block_size(kind)
    return max(1, round(megabytes * 1e6 / (_VALUES / num_values * nbytes)))


def _figures(kind: str, gguf: Load, folder: Load) -> list[Figure]:
    return [
        *(
            Figure(kind, "s/GB", (seconds,), f"{who}, {clock}")
            for who, load in (("GGUF", gguf), ("safetensors", folder))
            for clock, seconds in zip(("wall", "CPU"), load[:2], strict=True)
        ),
        Figure(kind, "GB", (gguf[2],), "in memory for each GB"),
        Figure(kind, "", (gguf[0] / folder[0],), "ratio, wall"),
        Figure(kind, "", (gguf[0] / gguf[2] / folder[0],), "ratio for each GB in memory, wall"),
        Figure(kind, "", (gguf[1] / folder[1],), "ratio, CPU"),
    ]
