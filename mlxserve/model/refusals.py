"""Explains why a folder's model could not be loaded, and what to do instead."""

from __future__ import annotations

import os
import re
from importlib.metadata import version

from mlxserve.core.errors import in_one_line
from mlxserve.hub.files import ModelFiles
from mlxserve.hub.unsupported_formats import (
    describe_kind,
    explain_quantisation,
    foreign_quantisation,
)
from mlxserve.model.definitions import NotText, is_installed
from mlxserve.system.extras import extra_command

_CONVERSION = "Take an MLX conversion of the model, such as those of mlx-community"
# Prefixes of weights of what is not the text model.
_OTHER_PARTS = re.compile(
    r"\b(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|embed_vision)\b"
)
# mlx's: the weights do not fit the module, by name or by shape.
_MISFIT = re.compile(r"not in model|Missing \d+ parameters|Expected shape")
# Of a transformer without a language model's head, as embedding models are published.
_BARE = re.compile(r"not in model:\s*+(embed_tokens|layers\.\d+|wte|h\.\d+)\.")


# mlx's: a function is compiled by a C++ compiler, in a folder for temporary files.
_OF_MLX_COMPILER = ("[Compile::eval_cpu]", "temp_directory_path")
_COMPILER_SAYS = ("No space left on device", "No such file or directory", "Permission denied")


def why_not_loaded(files: ModelFiles, error: BaseException) -> str:
    """Return the refusal's text for an exception of `mlx_lm.utils.load_model`."""
    return f"{files.name} {_reason(files, error)}"


def compiler_failure(name: str, error: BaseException) -> str | None:
    """Return the refusal's text if mlx could not compile a function for the CPU."""
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
    if isinstance(error, NotText):
        if (what := describe_kind(files.config)) is not None:
            return f"is {what}, and cannot be served."
        return (
            f"is a {kind} model. mlx-vlm has a definition of it, but not one that writes a token after "
            f"another: {reason}."
        )
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return _needs(error.name, "mlx-vlm", kind)
    if (method := foreign_quantisation(files.config)) is not None:
        return f"{explain_quantisation(method)} ({reason})"
    if not _MISFIT.search(str(error)):
        return f"cannot be loaded: {reason}"
    return _misfit(files, error)


def _misfit(files: ModelFiles, error: BaseException) -> str:
    """Explain weights that do not fit mlx-lm's definition of the model."""
    reason = in_one_line(error)
    kind = files.config.get("model_type")
    if (what := describe_kind(files.config)) is not None:
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
    """`cause`: mlx-lm's failure to import the definition's module."""
    kind = files.config.get("model_type")
    if cause.name is not None and not cause.name.startswith("mlx_lm"):
        return _needs(cause.name, "mlx-lm", kind)
    if (what := describe_kind(files.config)) is not None:
        return f"is {what}, and cannot be served."
    own = " Code in the model's folder is never run." if _has_code(files) else ""
    lm = f"mlx-lm {version('mlx-lm')}"
    if not is_installed():
        return (
            f"is a {kind} model, and {lm} has no definition of that kind.{own} mlx-vlm has more of them and is "
            f"not installed: `{extra_command('vlm')}`."
        )
    return (
        f"is a {kind} model, and neither {lm} nor mlx-vlm {version('mlx-vlm')} has a definition of that "
        f"kind.{own} A newer version may have one."
    )


def _needs(package: str, library: str, kind: object) -> str:
    return f"needs the package {package!r}, which {library}'s definition of {kind} imports: install it."


def _has_code(files: ModelFiles) -> bool:
    names = ("auto_map", "model_file")
    return any(files.config.get(name) for name in names) or any(files.path.glob("*.py"))
