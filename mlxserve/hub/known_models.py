"""Well-known models: their repositories, sizes, and the short names that people type.

    qwen3:4b                      mlx-community/Qwen3-4B-4bit
    llama3.2:1b                   mlx-community/Llama-3.2-1B-Instruct-4bit
    gpt-oss:20b                   mlx-community/gpt-oss-20b-MXFP4-Q8

Short names are family:size, as Ollama's; LM Studio's publisher/family-size is understood as well. Data only;
never uses the network.
"""

from __future__ import annotations

import difflib
import re

# Name, billions of parameters, layers, key-value heads, head size, context, query heads, hidden and
# intermediate size, as in the model's config.json. The number of parameters follows from these and
# the vocabulary size (tests/hub/test_catalog.py computes it). The 4-bit files have 4.5 bits per
# weight, including embeddings: each group of 64 has a 16-bit scale and a 16-bit bias. Norms are too
# small to count, and an image encoder, which is not loaded, is left out.
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
    (
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        30.53,
        48,
        4,
        128,
        262_144,
        32,
        2048,
        8 * (768 + 2048),
    ),
    ("mlx-community/Qwen2.5-Coder-7B-Instruct-4bit", 7.62, 28, 4, 128, 32_768, 28, 3584, 18_944),
    ("mlx-community/Qwen2.5-Coder-32B-Instruct-4bit", 32.76, 64, 8, 128, 32_768, 40, 5120, 27_648),
    ("mlx-community/gemma-3-1b-it-qat-4bit", 1.0, 26, 1, 256, 32_768, 4, 1152, 6912),
    ("mlx-community/gemma-3-4b-it-4bit", 3.88, 34, 4, 256, 131_072, 8, 2560, 10_240),
    ("mlx-community/gemma-3-12b-it-4bit", 11.77, 48, 8, 256, 131_072, 16, 3840, 15_360),
    ("mlx-community/gemma-3-27b-it-4bit", 27.01, 62, 16, 128, 131_072, 32, 5376, 21_504),
    ("mlx-community/DeepSeek-R1-Distill-Qwen-1.5B-4bit", 1.78, 28, 2, 128, 131_072, 12, 1536, 8960),
    ("mlx-community/DeepSeek-R1-Distill-Qwen-7B-4bit", 7.62, 28, 4, 128, 131_072, 28, 3584, 18_944),
    (
        "mlx-community/DeepSeek-R1-Distill-Llama-8B-4bit",
        8.03,
        32,
        8,
        128,
        131_072,
        32,
        4096,
        14_336,
    ),
    (
        "mlx-community/DeepSeek-R1-Distill-Qwen-14B-4bit",
        14.77,
        48,
        8,
        128,
        131_072,
        40,
        5120,
        13_824,
    ),
    (
        "mlx-community/DeepSeek-R1-Distill-Qwen-32B-4bit",
        32.76,
        64,
        8,
        128,
        131_072,
        40,
        5120,
        27_648,
    ),
    ("mlx-community/Ministral-3-3B-Instruct-2512-4bit", 3.43, 26, 8, 128, 262_144, 32, 3072, 9216),
    (
        "mlx-community/Ministral-3-8B-Instruct-2512-4bit",
        8.49,
        34,
        8,
        128,
        262_144,
        32,
        4096,
        14_336,
    ),
    ("mlx-community/Phi-4-mini-instruct-4bit", 3.84, 32, 8, 128, 131_072, 24, 3072, 8192),
    ("mlx-community/phi-4-4bit", 14.66, 40, 10, 128, 16_384, 40, 5120, 17_920),
    ("mlx-community/SmolLM3-3B-4bit", 3.08, 36, 4, 128, 65_536, 16, 2048, 11_008),
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
    # 30 of 40 layers and 24 of 32 have a state instead of keys and values.
    (
        "mlx-community/Qwen3.5-9B-MLX-4bit",
        5.03,
        8 * 2 * 4 * 256,
        8 * 2 * 4,
        True,
        262_144,
        16,
        4096,
        12_288,
    ),
    (
        "mlx-community/Qwen3.5-35B-A3B-4bit",
        19.5,
        10 * 2 * 2 * 256,
        10 * 2 * 2,
        True,
        262_144,
        16,
        2048,
        8 * (512 + 2048),
    ),
    # Of 35 layers the last 20 use the keys of others; each fifth one sees all positions, with larger heads.
    (
        "mlx-community/gemma-4-e2b-it-4bit",
        2.61,
        12 * 2 * 256 + 3 * 2 * 512,
        15 * 2,
        False,
        131_072,
        8,
        1536,
        6144,
    ),
    (
        "mlx-community/gemma-4-31b-it-4bit",
        17.3,
        50 * 16 * 2 * 256 + 10 * 4 * 2 * 512,
        50 * 16 * 2 + 10 * 4 * 2,
        False,
        262_144,
        32,
        5376,
        21_504,
    ),
)

# Of both: the window that some of their layers have, and those layers' keys and values per token and rows.
KNOWN_WINDOWS = {
    "mlx-community/gemma-3-1b-it-qat-4bit": (512, 22 * 2 * 256, 22 * 2),
    "mlx-community/gemma-3-4b-it-4bit": (1024, 29 * 4 * 2 * 256, 29 * 4 * 2),
    "mlx-community/gemma-3-12b-it-4bit": (1024, 40 * 8 * 2 * 256, 40 * 8 * 2),
    "mlx-community/gemma-3-27b-it-4bit": (1024, 52 * 16 * 2 * 128, 52 * 16 * 2),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": (128, 12 * 8 * 2 * 64, 12 * 8 * 2),
    "mlx-community/gemma-4-e2b-it-4bit": (512, 12 * 2 * 256, 12 * 2),
    "mlx-community/gemma-4-31b-it-4bit": (1024, 50 * 16 * 2 * 256, 50 * 16 * 2),
}
# Of KNOWN_MIXED: what `hub/step_estimate.py` calls copied.
KNOWN_COPIED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 2 * 3 * 64,
    "mlx-community/LFM2-8B-A1B-4bit": 2 * 8 * 64,
    "mlx-community/gpt-oss-20b-MXFP4-Q8": 2 * 8 * 64,
}
REPOSITORIES = tuple(row[0] for row in (*KNOWN, *KNOWN_MIXED))
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_ALIASES = {
    "smollm2": SMOLLM2,
    "smollm2:135m": SMOLLM2,
    "phi4:14b": "mlx-community/phi-4-4bit",
    "phi4-mini:3.8b": "mlx-community/Phi-4-mini-instruct-4bit",
}
# Publishers in LM Studio's names. Not microsoft and openai, whose own repositories are called the same.
_LM_STUDIO = frozenset({"qwen", "google", "mistralai", "meta-llama", "liquid", "deepseek"})
# Models that embed or rank texts, by Ollama's names where it has them.
_EMBEDDERS = {
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mxbai-embed-large": "mixedbread-ai/mxbai-embed-large-v1",
    "snowflake-arctic-embed": "Snowflake/snowflake-arctic-embed-l",
    "bge-large": "BAAI/bge-large-en-v1.5",
    "gte-modernbert": "Alibaba-NLP/gte-modernbert-base",
    "qwen3-embedding": "Qwen/Qwen3-Embedding-0.6B",
    "qwen3-embedding:0.6b": "Qwen/Qwen3-Embedding-0.6B",
    "qwen3-embedding:4b": "Qwen/Qwen3-Embedding-4B",
    "qwen3-embedding:8b": "Qwen/Qwen3-Embedding-8B",
    "qwen3-reranker": "Qwen/Qwen3-Reranker-0.6B",
    "qwen3-reranker:0.6b": "Qwen/Qwen3-Reranker-0.6B",
    "qwen3-reranker:4b": "Qwen/Qwen3-Reranker-4B",
    "qwen3-reranker:8b": "Qwen/Qwen3-Reranker-8B",
    "bge-reranker-base": "BAAI/bge-reranker-base",
    "bge-reranker-v2-m3": "BAAI/bge-reranker-v2-m3",
}
_SIZE = re.compile(r"-(e?\d+(?:\.\d+)?b)(?:-|$)")  # -4b-, -0.6b- or -e2b-
_VERSION = re.compile(
    r"^([a-z]+)-(?=\d+(?:\.\d+)?-)"
)  # llama-3.2- is called llama3.2, gemma-3- gemma3
_DISTILLED = re.compile(r"-distill-[a-z]+")  # people leave out the distilled model
_SUGGESTIONS = 3


def short_name(repository: str) -> str:
    """Return the short name of a well-known model."""
    if repository == SMOLLM2:
        return "smollm2"
    name = repository.rpartition("/")[2].lower()
    name = _DISTILLED.sub("", _VERSION.sub(r"\1", name))
    if match := _SIZE.search(name):
        return f"{name[: match.start()]}:{match[1]}"
    return name.removesuffix("-4bit").removesuffix("-instruct")


def repository_of(name: str) -> str | None:
    """Return the repository of a short name in any spelling; None if unknown."""
    plain = _plain(_in_lm_studio(name) or name.removesuffix(":latest"))
    aliases = {_plain(key): known for key, known in (_ALIASES | _EMBEDDERS).items()}
    if (alias := aliases.get(plain)) is not None:
        return alias
    for repository in REPOSITORIES:
        last = repository.rpartition("/")[2]
        if plain in (
            _plain(short_name(repository)),
            _plain(last),
            _plain(last.removesuffix("-4bit")),
        ):
            return repository
    sizes = [key for key in REPOSITORIES if plain == _plain(short_name(key).partition(":")[0])]
    return sizes[0] if plain and len(sizes) == 1 else None


def _in_lm_studio(name: str) -> str | None:
    """Return the short name for one of LM Studio's, such as google/gemma-3-12b.

    None for other names. A repository with the publisher's own weights differs: by capitals, or by
    an ending such as -it.
    """
    publisher, _, rest = name.partition("/")
    if publisher not in _LM_STUDIO or rest != rest.lower():
        return None
    known = (short_name(repository) for repository in REPOSITORIES)
    return next((short for short in known if _plain(short) == _plain(rest)), None)


def families() -> frozenset[str]:
    """Family names without a size: qwen3, llama3.2."""
    return frozenset(short_name(repository).partition(":")[0] for repository in REPOSITORIES)


def suggestions(name: str) -> list[str]:
    """Suggest short names, most likely first; a family name suggests its sizes."""
    known = [*(short_name(repository) for repository in REPOSITORIES), *_EMBEDDERS]
    wanted = _plain(name.rpartition("/")[2])
    family = [short for short in known if wanted and wanted == _plain(short.partition(":")[0])]
    plain = {_plain(short): short for short in known}
    close = difflib.get_close_matches(wanted, plain, n=_SUGGESTIONS, cutoff=0.6)
    part = [
        short
        for key, short in plain.items()
        if len(wanted) > 2 and (key in wanted or wanted in key)
    ]
    names = dict.fromkeys([*family, *(part or [plain[key] for key in close])])
    return list(names) if family else list(names)[:_SUGGESTIONS]


def _plain(name: str) -> str:
    """Lower case, without punctuation, which people spell differently."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())
