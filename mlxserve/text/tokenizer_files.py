"""Loads a model folder's tokenizer through mlx-lm, which adds fixes for each family to transformers.

The folder's config.json is not read by transformers, which refuses values in it that mlx-lm takes, and
no code of the folder is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxserve.core.errors import UnsupportedModel, in_one_line
from mlxserve.system.deferred_packages import defer_packages
from mlxserve.system.files import MAX_TEXT, check_model_files, read_json

# Without any of these, transformers would build a tokenizer with an empty vocabulary.
_TABLES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
_READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ImportError,
    AttributeError,
    RecursionError,
)
_ONLY_CODE = (
    "The tokenizer in {path} is code in the model's folder (auto_map in tokenizer_config.json), which is "
    "never run. Take a version of the model with a tokenizer.json, or put that of one into the folder."
)
# Transformers' class of what tokenizer.json alone says.
_PLAIN = "TokenizersBackend"


def load_tokenizer(path: Path, eos_token_ids: Sequence[int]) -> Any:
    """Return mlx-lm's wrapper of the tokenizer. Raises UnsupportedModel if it is unreadable."""
    # A tokenizer needs neither all of mlx-lm nor all of transformers: half a second of CPU.
    defer_packages()
    from mlx_lm.tokenizer_utils import load

    try:
        check_model_files(path)
        if not any(file for pattern in _TABLES for file in path.glob(pattern)):
            if _read(path / "tokenizer_config.json").get("auto_map") is not None:
                raise UnsupportedModel(_ONLY_CODE.format(path=path))
            raise ValueError("there is no vocabulary file")
        arguments = {"trust_remote_code": False, **_class_of(path)}
        return load(path, arguments, eos_token_ids=list(eos_token_ids) or None)
    except Exception as error:
        # The Rust library raises a bare Exception for a vocabulary that it cannot read.
        if type(error) is not Exception and not isinstance(error, _READ_ERRORS):
            raise
        raise UnsupportedModel(
            f"The tokenizer in {path} cannot be read: {in_one_line(error)}. The folder must contain "
            "a tokenizer.json (or tokenizer.model) and a tokenizer_config.json."
        ) from error


def _class_of(path: Path) -> dict[str, Any]:
    """Arguments from which AutoTokenizer chooses a class: the model type's default config.

    If tokenizer_config.json names a class of the folder's own, tokenizer.json alone decides.
    """
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    content, chosen = _read(path / "config.json"), _read(path / "tokenizer_config.json")
    if chosen.get("auto_map") is not None and (path / "tokenizer.json").exists():
        plain = (kind for kind, name in TOKENIZER_MAPPING_NAMES.items() if name == _PLAIN)
        return {"tokenizer_type": next(plain)}
    kind = content.get("model_type")
    try:
        config = AutoConfig.for_model(str(kind))
    except Exception:  # noqa: BLE001 - an unknown kind, or one without valid defaults: its name has to do
        config = PreTrainedConfig()
        config.model_type = kind
    if isinstance(named := content.get("tokenizer_class"), str):
        config.tokenizer_class = named
    return {"config": config}


def _read(file: Path) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    try:
        content = read_json(file, MAX_TEXT)
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
