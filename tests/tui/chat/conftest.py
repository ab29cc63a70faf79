"""Fixtures of the tests of chats: a file, and a store in it."""

from __future__ import annotations

from tests.history.conftest import path, store

__all__ = ["path", "store"]
