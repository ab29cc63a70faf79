"""Well-known models: their repositories, sizes, and the short names that people type.

    qwen3:4b                      mlx-community/Qwen3-4B-4bit
    llama3.2:1b                   mlx-community/Llama-3.2-1B-Instruct-4bit
    gpt-oss:20b                   mlx-community/gpt-oss-20b-MXFP4-Q8

Short names are family:size, as Ollama's. Data only; never uses the network.
"""

from __future__ import annotations

import difflib
import re

# Name, billions of parameters, layers, key-value heads, head size, context, query heads, hidden and
# intermediate size, as in the model's config.json. The number of parameters follows from these and
# the vocabulary size (tests/hub/test_catalog.py computes it). The 4-bit files have 4.5 bits per
# weight, including embeddings: each group of 64 has a 16-bit scale and a 16-bit bias. Norms are too
# small to count.
KNOWN = (
    ("mlx-community/Qwen3-0.6B-4bit", 0.6, 28, 8, 128, 40_960, 16, 1024, 3072),
    ("mlx-community/Llama-3.2-1B-Instruct-4bit", 1.24, 16, 8, 64, 131_072, 32, 2048, 8192),
    ("mlx-community/Llama-3.2-3B-Instruct-4bit", 3.21, 28, 8, 128, 131_072, 24, 3072, 8192),
    ("mlx-community/Qwen3-4B-4bit", 4.02, 36, 8, 128, 40_960, 32, 2560, 9728),
    ("mlx-community/Mistral-7B-Instruct-v0.3-4bit", 7.25, 32, 8, 128, 32_768, 32, 4096, 14_336),
    ("mlx-community/Qwen3-8B-4bit", 8.19, 36, 8, 128, 40_960, 32, 4096, 12_288),
    ("mlx-community/Qwen3-14B-4bit", 14.77, 40, 8, 128, 40_960, 40, 5120, 17_408),
    ("mlx-community/Qwen3-30B-A3B-4bit", 30.53, 48, 4, 128, 40_960, 32, 2048, 8 * (768 + 2048)),
    ("mlx-community/Qwen3-32B-4bit", 32.76, 64, 8, 128, 40_960, 64, 5120, 25_600),
)
BITS_PER_WEIGHT = 4.5
# Models whose layers differ from each other. Name, GB of weights; over all layers keys and values per
# token and the rows that they are in (a head's keys or values; 0 for latents); whether there are recurrent
# states; context, query heads, hidden size, inner values as `Entry`.
KNOWN_MIXED = (
    (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        0.27,
        30 * 2 * 3 * 64,
        30 * 2 * 3,
        False,
        8192,
        9,
        576,
        1536,
    ),
    (
        "mlx-community/LFM2-8B-A1B-4bit",
        4.69,
        6 * 2 * 8 * 64,
        6 * 2 * 8,
        True,
        128_000,
        32,
        2048,
        4 * (1792 + 2048),
    ),
    (
        "mlx-community/gpt-oss-20b-MXFP4-Q8",
        12.1,
        24 * 2 * 8 * 64,
        24 * 2 * 8,
        False,
        131_072,
        64,
        2880,
        4 * 2 * 2880,
    ),
    (
        "mlx-community/GLM-4.7-Flash-4bit",
        16.9,
        47 * (512 + 64),
        0,
        False,
        202_752,
        20,
        2048,
        4 * (1536 + 2048),
    ),
    (
        "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit",
        44.8,
        12 * 2 * 2 * 256,
        12 * 2 * 2,
        True,
        262_144,
        16,
        2048,
        10 * (512 + 2048),
    ),
)

REPOSITORIES = tuple(row[0] for row in (*KNOWN, *KNOWN_MIXED))
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ALIASES = {"smollm2": SMOLLM2, "smollm2:135m": SMOLLM2}
_SIZE = re.compile(r"-(\d+(?:\.\d+)?b)(?:-|$)")  # -4b- or -0.6b-
_SUGGESTIONS = 3


def short_name(repository: str) -> str:
    """What a well-known model is called for short."""
    if repository in _ALIASES.values():
        return next(alias for alias, known in _ALIASES.items() if known == repository)
    name = repository.rpartition("/")[2].lower()
    name = re.sub(r"^([a-z]+)-(?=\d+\.\d)", r"\1", name)  # llama-3.2 is llama3.2
    if found := _SIZE.search(name):
        return f"{name[: found.start()]}:{found[1]}"
    return name.removesuffix("-4bit")


def repository_of(name: str) -> str | None:
    """The repository that a short name means, spelled in any way; None if there is none."""
    asked = _plain(name)
    if (alias := {_plain(one): known for one, known in _ALIASES.items()}.get(asked)) is not None:
        return alias
    for repository in REPOSITORIES:
        last = repository.rpartition("/")[2]
        if asked in (
            _plain(short_name(repository)),
            _plain(last),
            _plain(last.removesuffix("-4bit")),
        ):
            return repository
    return None


def families() -> frozenset[str]:
    """Names without a size: qwen3, llama3.2."""
    return frozenset(short_name(repository).partition(":")[0] for repository in REPOSITORIES)


def suggestions(name: str) -> list[str]:
    """Short names that may have been meant, most likely first; a family alone means its sizes."""
    known = [short_name(repository) for repository in REPOSITORIES]
    asked = _plain(name.rpartition("/")[2])
    family = [one for one in known if asked and asked == _plain(one.partition(":")[0])]
    plain = {_plain(one): one for one in known}
    close = difflib.get_close_matches(asked, plain, n=_SUGGESTIONS, cutoff=0.6)
    part = [one for key, one in plain.items() if len(asked) > 2 and (key in asked or asked in key)]
    found = dict.fromkeys([*family, *(part or [plain[key] for key in close])])
    return list(found) if family else list(found)[:_SUGGESTIONS]


def _plain(name: str) -> str:
    """Without case and signs, which people spell differently."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())
