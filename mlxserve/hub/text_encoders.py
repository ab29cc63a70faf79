"""TextEncoder: how a model embeds or ranks texts instead of writing, from its files.

    modules.json                        sentence-transformers' list: Transformer, Pooling, Dense ..., Normalize
    1_Pooling/config.json               how the tokens' vectors become one
    2_Dense/config.json                 a layer after that; its weights lie beside it
    sentence_bert_config.json           max_seq_length
    config_sentence_transformers.json   prompts: what is put before a query or a document

A cross-encoder, which scores a query and a document together, has a head for one label instead.
Imports no mlx.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlxserve.core.errors import UnsupportedModel
from mlxserve.hub.context import context_of
from mlxserve.hub.files import ModelFiles
from mlxserve.system.files import MAX_TEXT, read_json

# By whose definition they are computed: mlx-vlm's, by its own name for the kind; the others by mlx-lm's.
ENCODERS: Mapping[str, str] = {
    "bert": "bert",
    "roberta": "xlm_roberta",
    "xlm-roberta": "xlm_roberta",
    "camembert": "xlm_roberta",
    "modernbert": "modernbert",
}
_OFFSET = "xlm_roberta"  # its first position is the one after the padding's
_JUDGE = (
    "qwen3"  # the only kind of language models that are published as rerankers under their own head
)
_WITH_HEADS = "ForSequenceClassification"
_MAX_PROMPTS, _MAX_MODULES = 1_000, 20
# Tokenizers without a longest length write a number of thirty digits.
_NO_LIMIT = 1_000_000


class TokenPooling(StrEnum):
    """How the token vectors of a text become one, in the order of concatenation."""

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST = "lasttoken"


_FLAGS = {
    "pooling_mode_cls_token": TokenPooling.CLS,
    "pooling_mode_max_tokens": TokenPooling.MAX,
    "pooling_mode_mean_tokens": TokenPooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": TokenPooling.MEAN_SQRT,
    "pooling_mode_weightedmean_tokens": TokenPooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": TokenPooling.LAST,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling. `activation`: "identity", "tanh", "relu" or "gelu".

    weights: a file that a conversion to MLX may have put into the model's own
    """

    weights: Path
    in_features: int
    out_features: int
    activation: str


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """How a model embeds or ranks texts.

    kind           mlx-vlm's name for the definition; None for a decoder, of mlx-lm
    poolings       joined in this order
    dense          layers after them
    normalizes     whether vectors are scaled to length one
    max_length     tokens of a text, including special tokens
    prompts        text prefixes by name
    default_prompt the prefix if a request names none
    is_reranker    scores a query and a document instead of making vectors
    judges         a reranker that is a language model, whose next word is "yes" or "no" (Qwen3-Reranker)
    says_pooling   whether the files say how to pool; otherwise it is what their kind usually does
    """

    kind: str | None
    poolings: tuple[TokenPooling, ...]
    dense: tuple[DenseLayer, ...]
    normalizes: bool
    max_length: int
    prompts: Mapping[str, str]
    default_prompt: str | None
    is_reranker: bool
    judges: bool
    says_pooling: bool


def text_encoder(files: ModelFiles) -> TextEncoder | None:
    """Return how a model embeds or ranks texts; None for a language model.

    Raises UnsupportedModel for options that are not implemented.
    """
    if files.gguf is not None:
        return None
    model_type = str(files.config.get("model_type"))
    kind, is_listed = ENCODERS.get(model_type), (files.path / "modules.json").exists()
    is_classifier = _is_classifier(files.config)
    judges = not is_classifier and model_type == _JUDGE and "reranker" in files.name.lower()
    if not judges and not _is_encoder(
        files, kind, is_listed=is_listed, is_classifier=is_classifier
    ):
        return None
    if is_classifier:
        _check_classifier(files, kind)
    modules = _Modules(files)
    prompts = _object(files.path / "config_sentence_transformers.json")
    return TextEncoder(
        kind=kind,
        poolings=modules.poolings or (_usual_pooling(files.config, kind),),
        dense=tuple(modules.dense),
        normalizes=modules.normalizes or not is_listed,
        max_length=_max_length(files, kind),
        prompts=_prompts(prompts.get("prompts")),
        default_prompt=name
        if isinstance(name := prompts.get("default_prompt_name"), str)
        else None,
        is_reranker=is_classifier or judges,
        judges=judges,
        says_pooling=bool(modules.poolings),
    )


def is_text_encoder(files: ModelFiles) -> bool:
    """True if the model is an encoder or reranker; cheaper than `text_encoder`."""
    try:
        return text_encoder(files) is not None
    except UnsupportedModel:
        return True


def _is_encoder(
    files: ModelFiles, kind: str | None, *, is_listed: bool, is_classifier: bool
) -> bool:
    if kind is not None:
        heads = files.config.get("architectures")
        other = isinstance(heads, list) and any(
            "TokenClassification" in str(head) for head in heads
        )
        return not other
    if is_classifier:
        # Refused by the sentence for classifiers.
        return False
    # Conversions of decoders for vectors often lack modules.json.
    is_bidirectional = files.config.get("use_bidirectional_attention") is True
    return is_listed or is_bidirectional or "embedding" in files.name.lower()


def _is_classifier(config: Mapping[str, Any]) -> bool:
    heads = config.get("architectures")
    return isinstance(heads, list) and any(str(head).endswith(_WITH_HEADS) for head in heads)


def _check_classifier(files: ModelFiles, kind: str | None) -> None:
    config = files.config
    labels = config.get("id2label")
    num_labels = config.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if num_labels != 1:
        raise UnsupportedModel(
            f"{files.name} is a classifier with {num_labels} labels. Of classifiers, only rerankers are "
            "served, which have one."
        )
    assert kind is not None, "others are no encoders"


class _Modules:
    """The modules after the transformer in modules.json; empty without the file."""

    def __init__(self, files: ModelFiles) -> None:
        self.poolings: tuple[TokenPooling, ...] = ()
        self.dense: list[DenseLayer] = []
        self.normalizes = False
        self._name = files.name
        for kind, folder in _listed(files):
            if kind == "Pooling":
                self.poolings = self._pooling(folder)
            elif kind == "Dense":
                self.dense.append(self._dense(folder))
            elif kind == "Normalize":
                self.normalizes = True
            elif kind not in ("Transformer", "Dropout"):
                raise UnsupportedModel(
                    f"{files.name}: modules.json asks for a module {kind!r:.40}, which is not computed here."
                )

    def _pooling(self, folder: Path) -> tuple[TokenPooling, ...]:
        config = _object(folder / "config.json")
        if config.get("include_prompt", True) is not True:
            raise UnsupportedModel(
                f"{self._name} pools its vectors without the tokens of the prompt, which is not done here."
            )
        named = config.get("pooling_mode")
        wanted = set(named) if isinstance(named, list) else {named} - {None}
        wanted |= {mode.value for flag, mode in _FLAGS.items() if config.get(flag) is True}
        if unknown := wanted - set(TokenPooling):
            raise UnsupportedModel(
                f"{self._name}: {folder.name}/config.json asks for the pooling {sorted(map(str, unknown))}, "
                "which is not computed here."
            )
        return tuple(mode for mode in TokenPooling if mode in wanted) or (TokenPooling.MEAN,)

    def _dense(self, folder: Path) -> DenseLayer:
        config = _object(folder / "config.json")
        sizes = [config.get(key) for key in ("in_features", "out_features")]
        activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2].lower()
        if not all(isinstance(size, int) and 0 < size < 1 << 20 for size in sizes):
            raise UnsupportedModel(
                f"{self._name}: {folder.name}/config.json must give in_features and out_features."
            )
        if activation not in ("identity", "tanh", "relu", "gelu"):
            raise UnsupportedModel(
                f"{self._name}: {folder.name} has the activation {activation!r:.40}, which is not computed "
                "here."
            )
        return DenseLayer(
            folder / "model.safetensors", int(sizes[0] or 0), int(sizes[1] or 0), activation
        )


def _listed(files: ModelFiles) -> Iterator[tuple[str, Path]]:
    """(kind, folder) of each module. Raises UnsupportedModel."""
    file = files.path / "modules.json"
    if not file.exists():
        return
    try:
        listed = read_json(file, MAX_TEXT)
        for module in sorted(listed, key=lambda module: int(module["idx"]))[:_MAX_MODULES]:
            folder = (files.path / str(module["path"])).resolve()
            if not folder.is_relative_to(files.path.resolve()):
                raise ValueError(f"{module['path']!r:.80} is outside of the folder")
            yield str(module["type"]).rpartition(".")[2], folder
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UnsupportedModel(f"{files.name}: modules.json cannot be read: {error}") from error


def _usual_pooling(config: Mapping[str, Any], kind: str | None) -> TokenPooling:
    is_causal = kind is None and config.get("use_bidirectional_attention") is not True
    return TokenPooling.LAST if is_causal else TokenPooling.MEAN


def _max_length(files: ModelFiles, kind: str | None) -> int:
    """The lowest length limit that the files name."""
    context = context_of(files.config)
    longest = 512 if context is None else context.length
    if kind == _OFFSET:
        padding = files.config.get("pad_token_id")
        longest -= 1 + (padding if isinstance(padding, int) else 1)
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        value = _object(files.path / name).get(key)
        if isinstance(value, int) and 2 <= value < _NO_LIMIT:
            longest = min(longest, value)
    return longest


def _prompts(prompts: object) -> dict[str, str]:
    if not isinstance(prompts, dict):
        return {}
    named = ((str(name), text) for name, text in prompts.items() if isinstance(text, str))
    return dict(list(named)[:_MAX_PROMPTS])


def _object(file: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if the file is missing or holds anything else.

    Raises UnsupportedModel if it cannot be read.
    """
    try:
        content = read_json(file, MAX_TEXT)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file.parent.name}/{file.name} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
