"""Messages for folders and models in formats that mlxserve does not serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxserve.hub.assistants import is_assistant

# Words in a `model_type`. Asked only where there is no definition, or where it does not fit the weights.
_ENCODERS = ("bert", "electra", "mpnet", "clip", "siglip", "embedding")
_AUDIO = frozenset({"whisper", "wav2vec", "parakeet", "kokoro", "moshi", "musicgen"})
_AUDIO |= {"audio", "speech", "tts", "asr"}
_AUDIO_KEYS = ("n_mels", "sample_rate")  # keys of conversions that name no `model_type`
_CONVERTED = ("mxfp4", "mxfp8", "bitnet")
_ENCODER_HEADS = ("ForMaskedLM", "ForTokenClassification")


def describe_kind(config: Mapping[str, Any]) -> str | None:
    """Describe a model that does not write text, and its purpose; None if unrecognised."""
    kind = str(config.get("model_type")).lower()
    if is_assistant(config):
        return "an assistant of Gemma 4, which guesses tokens for its own model (--draft-model)"
    names = config.get("architectures")
    heads = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if any(word in kind for word in _AUDIO) or any(key in config for key in _AUDIO_KEYS):
        return "a model for audio" + (f" ({kind})" if config.get("model_type") else "")
    if any(name.endswith("ForSequenceClassification") for name in heads):
        return f"a classifier or reranker ({heads[0]}), which scores texts and writes none"
    is_encoder = any(word in kind for word in _ENCODERS)
    if is_encoder or any(name.endswith(_ENCODER_HEADS) for name in heads):
        return f"an encoder ({kind}), which turns texts into vectors and writes none"
    if config.get("is_encoder_decoder") is True:
        return f"an encoder with a decoder ({kind}) and not a decoder alone"
    return None


def foreign_quantisation(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method in config.json, if neither MLX's nor mlx-lm's."""
    for part in (config, config.get("text_config")):
        written = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(written, Mapping):
            method = written.get("quant_method")
            return method if isinstance(method, str) and method not in _CONVERTED else None
    return None


def explain_quantisation(method: str) -> str:
    """Explain why weights of another quantisation are not loaded, and the alternative."""
    names = {"fp8": "FP8 (8-bit floats)", "bitsandbytes": "bitsandbytes"}
    return (
        f"is quantised with {names.get(method, method.upper())}, in a form that cannot be converted to "
        "MLX's. Take an MLX conversion of the model, such as those of mlx-community, or make one from "
        "the original weights with `mlx_lm.convert`."
    )


def describe_folder(path: Path) -> str | None:
    """Describe a folder without a config.json; None if unrecognised."""
    if (path / "adapter_config.json").exists():
        return (
            "holds an adapter (adapter_config.json) and not a model. Serve it beside the model that it was "
            "made for, `mlxserve serve -m MODEL --adapter NAME=FOLDER`, or join them: "
            "`mlx_lm.fuse --model MODEL --adapter-path FOLDER`."
        )
    if (path / "model_index.json").exists():
        return "holds a model that makes images (model_index.json), not a language model."
    if (path / "params.json").exists():
        return (
            "holds weights in the format of their makers (params.json). Download the version for "
            "transformers, which has a config.json, or an MLX conversion."
        )
    return None


def describe_weights(path: Path) -> str:
    """Name the weight files of a folder that are not read."""
    endings = {".gguf": "GGUF", ".bin": "PyTorch", ".pt": "PyTorch", ".pth": "PyTorch"}
    endings |= {".npz": "old MLX", ".onnx": "ONNX", ".safetensors": "safetensors of another name"}
    by_kind = {endings[file.suffix]: file.name for file in path.glob("*") if file.suffix in endings}
    there = ", ".join(f"{name} ({kind})" for kind, name in sorted(by_kind.items()))
    return f"It has {there} instead. " if there else ""
