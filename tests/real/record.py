"""Record what other programs answer with a real model's file, as `figures/NAME.json`.

    python -m tests.real.record mlx-lm FILE.gguf        # its definition, in float32
    python -m tests.real.record transformers FILE.gguf  # needs torch and accelerate
    python -m tests.real.record llama.cpp FILE.gguf     # needs xllamacpp and llama-cpp-py-sync

None of them runs our engine. The weights are those of the file, dequantised to float32; llama.cpp
computes with its blocks.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlxserve.system.blas import load_blas
from tests.real.prompts import BOS, NUM_TOKENS, TEXT, prompts, texts

FIGURES = Path(__file__).parent / "figures"
PERPLEXITY_TOKENS = 1024
_ROWS = 512  # of a forward, whose logits are in memory at once


class Reference(Protocol):
    """A program that reads the file by itself."""

    versions: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, special tokens read as such, none added."""

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The most probable tokens after `ids`, and by how much each was ahead (in logits)."""

    def log_likelihoods(self, ids: Sequence[int]) -> list[float]:
        """ln p of each token but the first, given those before it."""


def versions_of(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES_OF_GEMMA = {
    **_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class MlxLm:
    """mlx-lm's definition of llama or of Gemma 3, with every weight dequantised to float32."""

    def __init__(self, path: str) -> None:
        import mlx.core as mx
        from gguf import GGUFReader
        from gguf.quants import dequantize

        self.versions = versions_of("mlx", "mlx-lm", "gguf", "tokenizers")
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        self.mx = mx
        is_gemma = fields["general.architecture"] == "gemma3"
        self.model = _gemma(fields) if is_gemma else _llama(fields)
        names = _NAMES_OF_GEMMA if is_gemma else _NAMES
        weights = []
        for tensor in reader.tensors:
            value = mx.array(dequantize(tensor.data, tensor.tensor_type)).astype(mx.float32)
            *block, name, leaf = tensor.name.split(".")
            if is_gemma and name.endswith(
                "_norm"
            ):  # the file has the factors, the model what is added to 1
                value = value - 1
            if name in ("attn_q", "attn_k") and not is_gemma:
                # The file has the two halves of each head interleaved.
                n = fields["llama.attention.head_count" + ("" if name == "attn_q" else "_kv")]
                value = value.reshape(n, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            prefix = f"model.layers.{block[1]}." if block else ""
            weights.append((f"{prefix}{names[name]}.{leaf}", value))
        self.model.load_weights(list(self.model.sanitize(dict(weights)).items()))
        self.tokenizer = _sentencepiece(fields) if is_gemma else _bpe(fields)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        _, tokens, leads = self.go_on(ids, 0, num_tokens)
        return tokens, leads

    def log_likelihoods(self, ids: Sequence[int]) -> list[float]:
        losses, _, _ = self.go_on(ids, len(ids) - 1, 0)
        return [-loss for loss in losses]

    def go_on(
        self, ids: Sequence[int], last: int, num_tokens: int
    ) -> tuple[list[float], list[int], list[float]]:
        """One pass: (-ln p of the `last` tokens of `ids`, the most probable ones after it, their leads)."""
        from mlx_lm.models.cache import make_prompt_cache

        mx, cache = self.mx, make_prompt_cache(self.model)
        losses: list[float] = []
        for start in range(0, len(ids), _ROWS):
            logits = self.model(mx.array([list(ids[start : start + _ROWS])]), cache=cache)[0]
            following = ids[start + 1 : start + _ROWS + 1]
            scores = logits[: len(following)]
            chosen = mx.take_along_axis(scores, mx.array(following)[:, None], 1)[:, 0]
            lost = mx.logsumexp(scores, axis=-1) - chosen
            mx.eval(lost, logits)
            losses += lost.tolist()
        tokens: list[int] = []
        leads: list[float] = []
        while len(tokens) < num_tokens:
            best = mx.sort(mx.topk(logits[-1], 2))
            tokens.append(int(mx.argmax(logits[-1])))
            leads.append(float(best[1] - best[0]))
            logits = self.model(mx.array([tokens[-1:]]), cache=cache)[0]
        return losses[len(losses) - last :], tokens, leads


def _llama(fields: Mapping[str, Any]) -> Any:
    from mlx_lm.models.llama import Model, ModelArgs

    return Model(
        ModelArgs(
            model_type="llama",
            hidden_size=fields["llama.embedding_length"],
            num_hidden_layers=fields["llama.block_count"],
            intermediate_size=fields["llama.feed_forward_length"],
            num_attention_heads=fields["llama.attention.head_count"],
            num_key_value_heads=fields["llama.attention.head_count_kv"],
            rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
            vocab_size=fields["llama.vocab_size"],
            rope_theta=fields["llama.rope.freq_base"],
            tie_word_embeddings=True,
        )
    )


def _gemma(fields: Mapping[str, Any]) -> Any:
    """What a file does not say is as in Google's configuration of this size."""
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    return Model(
        ModelArgs(
            model_type="gemma3_text",
            hidden_size=fields["gemma3.embedding_length"],
            num_hidden_layers=fields["gemma3.block_count"],
            intermediate_size=fields["gemma3.feed_forward_length"],
            num_attention_heads=fields["gemma3.attention.head_count"],
            num_key_value_heads=fields["gemma3.attention.head_count_kv"],
            head_dim=fields["gemma3.attention.key_length"],
            rms_norm_eps=fields["gemma3.attention.layer_norm_rms_epsilon"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            rope_theta=fields["gemma3.rope.freq_base"],
            rope_local_base_freq=10_000.0,
            query_pre_attn_scalar=256,
            sliding_window=fields["gemma3.attention.sliding_window"],
            sliding_window_pattern=6,
        )
    )


def _bpe(fields: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word, kind in kinds if kind == 3]
    )
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> Any:
    """Gemma's vocabulary: of two neighbours that make a piece, those of the best piece are joined first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    numbers = {word: number for number, word in enumerate(words)}
    pairs = [
        (-scores[number], numbers[word[:at]], numbers[word[at:]], word[:at], word[at:])
        for word, number in numbers.items()
        for at in range(1, len(word))
        if word[:at] in numbers and word[at:] in numbers
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    tokenizer = Tokenizer(models.BPE(numbers, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    kinds = zip(words, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word, kind in kinds if kind == 3]
    )
    return tokenizer


class Transformers:
    """transformers' own reading of the file, in float32."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.versions = versions_of("transformers", "torch", "gguf")
        file = Path(path)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self.model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        torch = self.torch
        tokens: list[int] = []
        leads: list[float] = []
        past, rows = None, list(ids)
        with torch.no_grad():
            while len(tokens) < num_tokens:
                out = self.model(
                    torch.tensor([rows]), past_key_values=past, use_cache=True, logits_to_keep=1
                )
                past, best = out.past_key_values, out.logits[0, -1].topk(2)
                tokens.append(int(best.indices[0]))
                leads.append(float(best.values[0] - best.values[1]))
                rows = tokens[-1:]
        return tokens, leads

    def log_likelihoods(self, ids: Sequence[int]) -> list[float]:
        torch = self.torch
        with torch.no_grad():
            scores = self.model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        values: list[float] = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return values


class LlamaCpp:
    """llama.cpp on a CPU as it is by default: with the file's own blocks, activations in 8 bits, keys and
    values in 16.

    The library is xllamacpp's, which is built for older systems as well; the declarations of its functions are
    those of llama-cpp-py-sync, whose own library needs glibc 2.38.
    """

    CONTEXT, BATCH = 8192, 512

    def __init__(self, path: str) -> None:
        from llama_cpp_py_sync._cffi_bindings import get_ffi
        from xllamacpp import xllamacpp

        self.versions = versions_of("xllamacpp", "llama-cpp-py-sync")
        self.ffi = get_ffi()
        self.lib = self.ffi.dlopen(xllamacpp.__file__)
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(path.encode(), params)
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch = self.CONTEXT, self.BATCH
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        self.context = self.lib.llama_init_from_model(self.model, params)

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        ids = self.ffi.new("llama_token[]", len(raw) + 1)
        count = self.lib.llama_tokenize(
            self.vocab, raw, len(raw), ids, len(raw) + 1, False, True
        )  # no special tokens are added, those in the text are read
        return [ids[number] for number in range(count)]

    def greedy(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        self._forget()
        tokens: list[int] = []
        leads: list[float] = []
        rows, start = list(ids), 0
        while len(tokens) < num_tokens:
            [logits] = self._logits(rows, start, is_last_only=True)
            order = logits.argsort()[-2:]
            tokens.append(int(order[1]))
            leads.append(float(logits[order[1]] - logits[order[0]]))
            rows, start = tokens[-1:], start + len(rows)
        return tokens, leads

    def log_likelihoods(self, ids: Sequence[int]) -> list[float]:
        import numpy as np

        self._forget()
        logits = self._logits(ids, 0, is_last_only=False)
        return [
            float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()))
            for row, token in zip(logits[:-1], ids[1:], strict=True)
        ]

    def _forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def _logits(self, ids: Sequence[int], first: int, *, is_last_only: bool) -> list[Any]:
        """Rows of float64 logits after tokens at positions from `first` on."""
        import numpy as np

        size = self.lib.llama_vocab_n_tokens(self.vocab)
        found = []
        for start in range(0, len(ids), self.BATCH):
            piece = ids[start : start + self.BATCH]
            batch = self.lib.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for n, token in enumerate(piece):
                batch.token[n], batch.pos[n] = token, first + start + n
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, 0
                batch.logits[n] = not is_last_only or start + n == len(ids) - 1
            if self.lib.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for n in range(len(piece)):
                if batch.logits[n]:
                    row = self.lib.llama_get_logits_ith(self.context, n)
                    values = np.frombuffer(self.ffi.buffer(row, 4 * size), np.float32)
                    found.append(values.astype(np.float64))
            self.lib.llama_batch_free(batch)
        return found


def figures_of(reference: str, model: str) -> dict[str, Any]:
    """What a program answered with this model's file, as recorded."""
    file = FIGURES / f"{model}.{reference}.json"
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures


REFERENCES: dict[str, Any] = {"mlx-lm": MlxLm, "transformers": Transformers, "llama.cpp": LlamaCpp}


def record(name: str, path: str) -> dict[str, Any]:
    reference: Reference = REFERENCES[name](path)
    answers = []
    for prompt in prompts() if "instruct" in path.lower() else texts():
        ids = reference.encode(prompt)
        tokens, leads = reference.greedy(ids, NUM_TOKENS)
        answers.append(
            {
                "num_prompt_tokens": len(ids),
                "tokens": tokens,
                "lead": round(min(leads), 4),
                "leads": [round(lead, 3) for lead in leads],
            }
        )
        print(len(ids), tokens[:8], min(leads), flush=True)
    begin = "" if "instruct" in path.lower() else BOS
    ids = reference.encode(begin + TEXT)[:PERPLEXITY_TOKENS]
    values = reference.log_likelihoods(ids)
    perplexity = math.exp(-sum(values) / len(values))
    return {
        "command": f"python -m tests.real.record {name} {Path(path).name}",
        "versions": reference.versions,
        "text_ids": reference.encode(TEXT)[:64],
        "perplexity": round(perplexity, 5),
        "answers": answers,
    }


def main() -> None:
    name, path = sys.argv[1:]
    load_blas()  # the reference BLAS of mlx's Linux wheel would take hours
    FIGURES.mkdir(exist_ok=True)
    figures = record(name, path)
    file = FIGURES / f"{Path(path).stem.lower()}.{name}.json"
    text = json.dumps(figures, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
