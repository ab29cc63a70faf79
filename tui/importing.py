"""Imports on threads, one at a time.

Two threads that import modules at once can wait for each other: one imports a package, whose
`__init__` imports a submodule; the other has begun to import that submodule and waits for the
package. Python then raises an error in one of them. `html` is such a package: markdown-it and Pygments
import it in two ways.
"""

from __future__ import annotations

import threading
from importlib import import_module

_turn = threading.Lock()


def import_in_turn(name: str) -> None:
    """Import a module, after those that other threads are importing by this function."""
    with _turn:
        import_module(name)
