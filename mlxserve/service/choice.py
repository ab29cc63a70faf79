"""Chooses the service manager of this system."""

from __future__ import annotations

import sys

from mlxserve.service.launchd import Launchd
from mlxserve.service.manager import ServiceManager, ServiceUnavailable
from mlxserve.service.systemd import Systemd


def service_manager() -> ServiceManager:
    """Return this system's service manager. Raises ServiceUnavailable if there is none."""
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "linux":
        return Systemd()
    raise ServiceUnavailable("Services are managed on macOS (launchd) and Linux (systemd) only.")
