"""`python -m tests.hub.gguf.judge FOLDER [NAME ...]`: what llama.cpp and mlxserve answer, for each architecture.

FOLDER has libllama and libggml, as `npm install @node-llama-cpp/linux-x64` puts them in `bins/linux-x64`. Each small
file is loaded by both. `--record` writes llama.cpp's answers to `judged.json`, with which the suite compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxserve.core.errors import UnsupportedModel, in_one_line
from mlxserve.hub.files import find_model
from mlxserve.model.load import read_model
from tests.hub.gguf.files import Array
from tests.hub.gguf.small_files import FILES, PROMPT, fingerprint, write_small

JUDGED = Path(__file__).with_name("judged.json")
NUM_BEST = 20
TOLERANCE = 1e-3


def probabilities(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def ours(file: Path) -> Array:
    """Probabilities after each token of the prompt."""
    model, _ = read_model(find_model(str(file)), is_metal=False)
    logits = model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    return probabilities(np.array(logits[0].astype(mx.float32)))


def theirs(folder: Path, file: Path) -> Array:
    """In a process of its own, since llama.cpp ends the process where an assertion fails."""
    answer = file.with_suffix(".npy")
    command = [
        sys.executable,
        "-m",
        "tests.hub.gguf.llama_cpp",
        str(folder),
        str(file),
        str(answer),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, input=json.dumps(PROMPT), check=False
    )
    if done.returncode != 0:
        raise ValueError(
            done.stderr.strip().splitlines()[-1][:200] if done.stderr else done.returncode
        )
    return probabilities(np.load(answer))


def best(rows: Array) -> list[tuple[list[int], list[float]]]:
    """The most probable tokens of the second and the last row."""
    chosen = []
    for row in (rows[1], rows[-1]):
        order = np.argsort(-row, kind="stable")[:NUM_BEST]
        chosen.append(([int(n) for n in order], [round(float(row[n]), 6) for n in order]))
    return chosen


def difference(rows: Array, judged: Sequence[tuple[list[int], list[float]]]) -> float:
    """The largest of the probabilities of the tokens that llama.cpp finds most probable."""
    pairs = zip((rows[1], rows[-1]), judged, strict=True)
    return max(
        float(np.abs(row[tokens] - np.array(values)).max()) for row, (tokens, values) in pairs
    )


def compare(folder: Path, case: str) -> tuple[str, Any]:
    """(a line, llama.cpp's answer or None)"""
    with TemporaryDirectory() as place:
        try:
            file = write_small(case, Path(place) / "small.gguf")
        except (UnsupportedModel, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"not written: {type(error).__name__} {in_one_line(error)}", None
        written = fingerprint(file)
        try:
            judged = theirs(folder, file)
        except ValueError as error:
            return f"llama.cpp: {error}", None
        try:
            found = ours(file)
        except (UnsupportedModel, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"mlxserve: {type(error).__name__} {in_one_line(error)}", None
    off = float(np.abs(found - judged).max())
    tokens = "".join("=" if same else "x" for same in found.argmax(-1) == judged.argmax(-1))
    verdict = "equal" if off < TOLERANCE else "DIFFER"
    line = f"{verdict} {off:.1e} of {judged.max():.2f} {tokens}"
    return line, {"off": float(f"{off:.1e}"), "file": written, "best": best(judged)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    judged = json.loads(JUDGED.read_text()) if JUDGED.exists() else {}
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        _judge_all(given, judged)
    if given.record:
        lines = [f' "{case}": {json.dumps(judged[case])}' for case in FILES if case in judged]
        JUDGED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _judge_all(given: argparse.Namespace, judged: dict[str, Any]) -> None:
    for case in FILES:
        if given.names and not {case, case.partition("/")[0]} & set(given.names):
            continue
        line, answer = compare(given.folder, case)
        print(f"{case:24} {line}", flush=True)
        if given.record and line.startswith("equal"):
            judged[case] = answer


if __name__ == "__main__":
    main()
