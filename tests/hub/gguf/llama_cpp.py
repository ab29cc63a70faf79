"""Asks llama.cpp itself for the logits of a GGUF file, through its C interface.

The library comes prebuilt in an npm package (`npm install @node-llama-cpp/linux-x64`, 10 MB), or from any build of
llama.cpp. Nothing of it is needed to run the tests, which compare with what it answered once (`judged.json`).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.hub.gguf.files import Array

# Passed and returned by value: larger than either of llama.cpp's two, whose fields all have defaults.
_PARAMETERS_SIZE = 512
_HALF, _SINGLE = 1, 0  # ggml's types of keys and values
_NO_FLASH = 0
_VOCABULARY_ONLY = 18  # the word whose first byte is this flag
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _Parameters(ctypes.Structure):
    _fields_ = (("content", ctypes.c_uint32 * (_PARAMETERS_SIZE // 4)),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class LlamaCpp:
    """folder: of libllama and libggml with their CPU backends"""

    def __init__(self, folder: Path) -> None:
        ggml = self._library(folder, "libggml.*so", "libggml.v*", "libggml.dylib")
        self._llama = self._library(folder, "libllama.so", "libllama.v*", "libllama.dylib")
        self._messages: list[str] = []
        self._log = _LOG(lambda level, text, _: self._note(level, text))
        llama = self._llama
        llama.llama_log_set(self._log, None)
        ggml.ggml_backend_load_all_from_path(str(folder).encode())
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(llama, name).restype = _Parameters
        llama.llama_model_load_from_file.restype = ctypes.c_void_p
        llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
        llama.llama_init_from_model.restype = ctypes.c_void_p
        llama.llama_init_from_model.argtypes = [ctypes.c_void_p, _Parameters]
        llama.llama_model_get_vocab.restype = ctypes.c_void_p
        llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        llama.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        llama.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        llama.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        llama.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
            *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ]
        llama.llama_free.argtypes = llama.llama_model_free.argtypes = [ctypes.c_void_p]

    @staticmethod
    def _library(folder: Path, *patterns: str) -> ctypes.CDLL:
        for pattern in patterns:
            for file in sorted(folder.glob(pattern)):
                return ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
        raise FileNotFoundError(f"{folder} has none of {', '.join(patterns)}")

    def _note(self, level: int, text: bytes) -> None:
        if level >= 3:  # warnings and errors
            self._messages.append(text.decode(errors="replace").strip())

    def logits(self, file: Path, prompt: Sequence[int]) -> Array:
        """(tokens, vocabulary) of a prompt. Raises ValueError with llama.cpp's own words."""
        llama = self._llama
        self._messages.clear()
        model = llama.llama_model_load_from_file(
            str(file).encode(), llama.llama_model_default_params()
        )
        if not model:
            raise ValueError(self._last_words())
        parameters = self._context_parameters(len(prompt))
        context = llama.llama_init_from_model(model, parameters)
        try:
            if not context:
                raise ValueError(self._last_words())
            return self._decoded(model, context, prompt)
        finally:
            if context:
                llama.llama_free(context)
            llama.llama_model_free(model)

    def tokens(self, file: Path, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text with a file's vocabulary, without tokens around; control tokens are read.

        Raises ValueError.
        """
        llama = self._llama
        self._messages.clear()
        parameters: _Parameters = llama.llama_model_default_params()
        parameters.content[_VOCABULARY_ONLY] |= 1
        model = llama.llama_model_load_from_file(str(file).encode(), parameters)
        if not model:
            raise ValueError(self._last_words())
        vocabulary = llama.llama_model_get_vocab(model)
        found = []
        for text in texts:
            raw, ids = text.encode(), (ctypes.c_int32 * (4 * len(text) + 16))()
            count = llama.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), False, True)
            found.append(list(ids[:count]))
        llama.llama_model_free(model)
        return found

    def _context_parameters(self, num_tokens: int) -> _Parameters:
        """A context for the prompt, with keys and values as float32."""
        parameters: _Parameters = self._llama.llama_context_default_params()
        words = parameters.content
        words[0] = max(256, num_tokens)  # n_ctx
        # The two types are the only neighbours that are float16, after the callbacks and the floats.
        [at] = [n for n in range(16, 40) if words[n] == words[n + 1] == _HALF]
        words[at] = words[at + 1] = _SINGLE
        words[13] = _NO_FLASH  # flash_attn_type
        return parameters

    def _decoded(self, model: int, context: int, prompt: Sequence[int]) -> Array:
        llama, count = self._llama, len(prompt)
        batch = _Batch(
            n_tokens=count,
            token=(ctypes.c_int32 * count)(*prompt),
            logits=(ctypes.c_int8 * count)(*[1] * count),
        )
        if (code := llama.llama_decode(context, batch)) != 0:
            raise ValueError(f"llama_decode returned {code}: {self._last_words()}")
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        rows = [llama.llama_get_logits_ith(context, number)[:size] for number in range(count)]
        return np.array(rows, np.float32)

    def _last_words(self) -> str:
        errors = [text for text in self._messages if text and "load_from_file" not in text]
        return " | ".join(errors[-3:]) or "llama.cpp gave no reason"


if __name__ == "__main__":
    folder, file, answer = (Path(each) for each in sys.argv[1:])
    try:
        np.save(answer, LlamaCpp(folder).logits(file, json.load(sys.stdin)))
    except ValueError as error:
        sys.exit(str(error))
