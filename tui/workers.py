"""Starts workers of Textual by what makes their coroutine.

A coroutine itself would not be run if the app ended before its worker's first step, and Python
would say so over the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from textual.dom import DOMNode
    from textual.worker import Worker

T = TypeVar("T")


def start_worker(
    node: DOMNode,
    work: Callable[[], Coroutine[Any, Any, T]],
    *,
    group: str = "default",
    exclusive: bool = False,
) -> Worker[T]:
    """Run `work`, a coroutine function or a partial of one, as long as `node` is mounted.

    exclusive: cancel the group's other workers of this node
    """
    worker: Worker[T] = node.run_worker(work, group=group, exclusive=exclusive)
    return worker
