"""A model's first run, in a child process: if it crashes, the server survives.

A definition may write past an array (mlx does not check indices), or need more memory than there
is; no exception says so. The child loads the model as this process would, probes it, and ends. Its
verdict is stored for this machine and these versions: a model that ended its process is refused at
once, and another one of a kind that has passed is not tried again.

    this process                          python -m mlxserve.model.load_check
    try_first  -- {"path": ...} -- stdin -->  load, probe
               <- {"refusal": ...} - stdout   or a signal
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlxserve.core.config import EngineConfig, data_home
from mlxserve.core.errors import MlxServeError, UnsupportedModel
from mlxserve.core.version import __version__
from mlxserve.helpers.environment import helper_environment
from mlxserve.helpers.errors import describe_exit
from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.hub.files import ModelFiles
from mlxserve.system.files import read_own_json, replace_file

log = logging.getLogger("mlxserve.model.load_check")

# A model of hundreds of gigabytes is read from an external disk.
SECONDS = 1800.0
_COMMAND = (sys.executable, "-P", "-m", "mlxserve.model.load_check")
_MAX_KEPT, _MAX_BYTES = 500, 1 << 20
_FAULTS = (
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
)


def try_first(
    config: EngineConfig,
    files: ModelFiles,
    memory_limit: int,
    *,
    command: Sequence[str] = _COMMAND,
    seconds: float = SECONDS,
) -> None:
    """Run the model in a child process, unless the config disables it or an earlier run passed.

    memory_limit: bytes that may be used. Raises UnsupportedModel if the child refused the model, or
        ended before it was through.
    """
    mode = config.trial_process or "never"
    if mode == "never" or files.name == MODEL_NAME:
        return
    verdicts, kind = Verdicts(data_home() / "trials.json"), _kind(files.config)
    if mode == "auto":
        if (reason := verdicts.refusal(files.fingerprint)) is not None:
            raise UnsupportedModel(reason)
        if verdicts.has_passed(kind):
            return
    job = {
        "path": str(files.path if files.gguf is None else files.weights[0]),
        "name": files.name,
        "memory_limit": memory_limit,
        "attention_backend": config.attention_backend,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    log.info("Computing a few tokens of %s in a process of its own first", files.name)
    try:
        refusal = _run(command, job, seconds)
    except _Ended as ended:
        refusal = (
            f"{files.name}: a process of its own computed a few tokens of this {kind} model first, and "
            f"{ended}. So it is not loaded here: mlx, or the definition of the model, cannot compute it on "
            "this machine. trial_process=always tries again."
        )
        if ended.is_fault:
            verdicts.keep(files.fingerprint, kind, refusal)
    if refusal is not None:
        raise UnsupportedModel(refusal)
    verdicts.keep(files.fingerprint, kind, None)


class Verdicts:
    """Verdicts of earlier runs, in a file of this machine.

    Another version of mlx starts a new file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._versions = [__version__, *_versions("mlx", "mlx-lm", "mlx-vlm")]

    def refusal(self, fingerprint: str) -> str | None:
        """Return the refusal of a model that crashed its process."""
        refusal = self._kept().get(fingerprint, {}).get("refusal")
        return refusal if isinstance(refusal, str) else None

    def has_passed(self, kind: str) -> bool:
        """True if any model of this kind passed."""
        return any(verdict == {"kind": kind, "refusal": None} for verdict in self._kept().values())

    def keep(self, fingerprint: str, kind: str, refusal: str | None) -> None:
        """Best effort: without the file, the next start tries again."""
        kept = {**self._kept(), fingerprint: {"kind": kind, "refusal": refusal}}
        newest = dict(list(kept.items())[-_MAX_KEPT:])
        content = json.dumps({"versions": self._versions, "models": newest})
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, content.encode())

    def _kept(self) -> dict[str, dict[str, Any]]:
        try:
            content = read_own_json(self._file, _MAX_BYTES)
            is_ours = content["versions"] == self._versions
            return {str(k): dict(v) for k, v in content["models"].items()} if is_ours else {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return {}


def _versions(*packages: str) -> Iterator[str]:
    """Versions of the installed packages that verdicts depend on."""
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def _kind(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    text = inner.get("model_type") if isinstance(inner, Mapping) else None
    return (
        f"{config['model_type']} ({text})" if isinstance(text, str) else str(config["model_type"])
    )


class _Ended(Exception):
    """The child ended too early; the message completes "The process ..."."""

    def __init__(self, message: str, *, is_fault: bool) -> None:
        super().__init__(message)
        self.is_fault = is_fault  # caused by its computation, not by another program


def _run(command: Sequence[str], job: Mapping[str, Any], seconds: float) -> str | None:
    """Run the child; return why it refused the model, or None. Raises _Ended."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps({**job, "parent": os.getpid()}),
            capture_output=True,
            text=True,
            errors="replace",
            env=helper_environment(),
            start_new_session=True,  # a Ctrl-C is for this process
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _Ended(f"was not through after {seconds:g} s", is_fault=False) from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        why = f" ({said[-1][:200]})" if said else ""
        raise _Ended(
            f"was ended by {_describe_exit(done.returncode)}{why}",
            is_fault=-done.returncode in _FAULTS,
        )
    refusal = json.loads(done.stdout.splitlines()[-1])["refusal"]
    return refusal if isinstance(refusal, str) else None


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "SIGKILL, as where there is not enough memory"
    return describe_exit(code)


def main() -> None:
    """Run the child.

    Any failure but a refusal is left to the parent's own load, which says more.
    """
    job = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    from mlxserve.system import machine

    machine.import_mlx_lm()
    from mlxserve.hub.files import find_model
    from mlxserve.model.attention import load_probed

    refusal = None
    try:
        load_probed(
            replace(find_model(job["path"]), name=job["name"]),
            is_metal=machine.is_metal(),
            memory_limit=job["memory_limit"],
            kv_cache_dtype=job["kv_cache_dtype"],
            attention_backend=job["attention_backend"],
        )
    except UnsupportedModel as error:
        refusal = str(error)
    except MlxServeError:
        pass
    sys.stdout.write(json.dumps({"refusal": refusal}) + "\n")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
