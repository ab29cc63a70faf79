"""The environment of helper processes: what Python and its libraries need, and no key or token.

A template that escaped its sandbox could read the environment of its process. So it gets what is
listed here, not all but what looks secret: nobody knows every name that a secret can have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "TZ"),
        *("VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("TOKENIZERS_PARALLELISM", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "MLXSERVE_BLAS"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD"),
    }
)
# Locale, the loader of shared libraries, malloc, threads of numeric libraries, the interpreter.
_BEGINNINGS = ("LC_", "DYLD_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "RAYON_", "PYTHON")


def helper_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a helper that imports what this process can."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _NAMES or name.startswith(_BEGINNINGS)
    }
    return {
        "MALLOC_ARENA_MAX": "2",  # an arena per thread would count as address space
        **kept,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
