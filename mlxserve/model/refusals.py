"""Why mlx-lm has refused a folder's model, in a sentence that says what to do instead."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import version

from mlxserve.errors import in_one_line
from mlxserve.hub.files import ModelFiles, text_config
from mlxserve.hub.other_kinds import kind_in_words, quantisation_in_words

_READ = ("mxfp4", "mxfp8", "bitnet")  # methods that mlx-lm converts: something else is wrong
_CONVERSION = "Take an MLX conversion of the model, such as those of mlx-community"
# Prefixes of weights of what is not the text model.
_OTHER_PARTS = re.compile(
    r"\b(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|embed_vision)\b"
)
# mlx's: the weights do not fit the module, by name or by shape.
_MISFIT = re.compile(r"not in model|Missing \d+ parameters|Expected shape")
# Of a transformer without a language model's head, as embedding models are published.
_BARE = re.compile(r"not in model: *\n?\s*(embed_tokens|layers\.\d+|wte|h\.\d+)\.")


# mlx's: a function is compiled by a C++ compiler, in a folder for temporary files.
_OF_MLX_COMPILER = ("[Compile::eval_cpu]", "temp_directory_path")
_COMPILER_SAYS = ("No space left on device", "No such file or directory", "Permission denied")


def why_not_loaded(files: ModelFiles, error: BaseException) -> str:
    """The refusal's text, for what `mlx_lm.utils.load_model` has raised."""
    return f"{files.name} {_reason(files, error)}"


def compiler_failure(name: str, error: BaseException) -> str | None:
    """The refusal's text where mlx could not compile a function for the CPU: not the model's fault."""
    if not any(mark in str(error) for mark in _OF_MLX_COMPILER):
        return None
    why = next(
        (words for words in _COMPILER_SAYS if words in str(error)), "the log has the details"
    )
    return (
        f"{name}: mlx could not compile a function for this CPU ({why}). It needs g++, and free space "
        f"in the folder for temporary files, {os.environ.get('TMPDIR') or '/tmp'} (TMPDIR)."
    )


def _reason(files: ModelFiles, error: BaseException) -> str:
    reason = in_one_line(error)
    kind = files.config.get("model_type")
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ImportError) and ("not supported" in reason or type(error) is SystemExit):
        return _no_definition(files, cause)
    if (method := _quantisation(files)) is not None:
        return f"{quantisation_in_words(method)} ({reason})"
    if not _MISFIT.search(str(error)):
        return f"cannot be loaded: {reason}"
    if (what := kind_in_words(files.config)) is not None:
        return f"is {what}, and cannot be served."
    if part := _OTHER_PARTS.search(reason):
        return (
            f"has weights of another part ({part[0]}), which this architecture of mlx-lm does not know: "
            f"{reason} Take a conversion of the text model made with mlx-lm, or remove these weights "
            "from the files."
        )
    if _BARE.search(str(error)):
        return (
            f"has the weights of a bare {kind} model without a language model's head, as embedding "
            f"models are published. {_CONVERSION}, which serves /v1/embeddings."
        )
    if "Missing" in reason:
        return (
            f"cannot be loaded: {reason} A file of weights may be missing or cut: download the model "
            "again. If it is complete, take a conversion made for mlx-lm."
        )
    return f"cannot be loaded: {reason}"


def _no_definition(files: ModelFiles, cause: ImportError) -> str:
    """`cause`: of mlx-lm's failure to import the module of this name."""
    kind = files.config.get("model_type")
    if cause.name is not None and not cause.name.startswith("mlx_lm"):
        return f"needs the package {cause.name!r}, which mlx-lm's definition of {kind} imports: install it."
    if (what := kind_in_words(files.config)) is not None:
        return f"is {what}, and cannot be served."
    own = " Code in the model's folder is never run." if _has_code(files) else ""
    return (
        f"is a {kind} model, and mlx-lm {version('mlx-lm')} has no definition of that kind.{own} A newer "
        "version of mlx-lm may have one."
    )


def _has_code(files: ModelFiles) -> bool:
    names = ("auto_map", "model_file")
    return any(files.config.get(name) for name in names) or any(files.path.glob("*.py"))


def _quantisation(files: ModelFiles) -> str | None:
    """The method that config.json names, if it is not MLX's."""
    written = files.config.get("quantization_config")
    if not isinstance(written, Mapping):
        written = text_config(files.config).get("quantization_config")
    method = written.get("quant_method") if isinstance(written, Mapping) else None
    return method if isinstance(method, str) and method not in _READ else None
