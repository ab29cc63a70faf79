"""`mcp.json`: the configured tool servers, in the format of Claude Desktop, Cursor and LM Studio.

    {"mcpServers": {"git":  {"command": "uvx", "args": ["mcp-server-git"], "env": {}},
                    "wiki": {"url": "https://wiki.example/mcp", "headers": {}}}}

Our extension is `timeout`, the seconds that a call may take. Fields of other programs are ignored.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.system.terminal_text import one_line

MAX_SIZE = 1 << 20  # bytes of the file
MAX_SERVERS = 50
CALL_SECONDS = 60.0  # unless the file says otherwise
_MAX_SECONDS = 3_600.0
ROOT = 0  # may do anything anyway
_EXAMPLE = '{"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}'


class ToolsError(Exception):
    """Tools cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """A server: a command to start here, or a URL."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None  # working folder of the command
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    call_seconds: float = CALL_SECONDS
    is_disabled: bool = False

    @property
    def digest(self) -> str:
        """Digest of the command or URL: another server of the same name gets no permissions."""
        what = [self.command, self.args, sorted(self.env.items()), self.folder, self.url]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    @property
    def address(self) -> str:
        """The command without arguments, which may hold secrets, or the URL without its query."""
        return one_line(self.url.partition("?")[0] if self.url else Path(self.command).name, 100)


def usual_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `~/.config/mlxserve/mcp.json`, or the file in $XDG_CONFIG_HOME."""
    folder = environment.get("XDG_CONFIG_HOME")
    base = Path(folder) if folder else Path("~/.config").expanduser()
    return base / "mlxserve" / "mcp.json"


def read_servers(file: Path) -> list[ServerEntry]:
    """List the servers in the order of the file; none without a file. Raises ToolsError."""
    try:
        text = _text(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ToolsError(f"{file} cannot be read: {error}.") from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ToolsError(
            f"{file}, line {error.lineno}: {error.msg}. Expected: {_EXAMPLE}"
        ) from error
    except RecursionError as error:
        raise ToolsError(f"{file} is nested too deeply. Expected: {_EXAMPLE}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ToolsError(f'{file}, line 1: there is no object "mcpServers". Expected: {_EXAMPLE}')
    if len(servers) > MAX_SERVERS:
        raise ToolsError(f"{file} has {len(servers)} servers; at most {MAX_SERVERS} are started.")
    return [_entry(name, fields, file, text) for name, fields in servers.items()]


def _text(file: Path) -> str:
    """Read the file. Raises OSError and ValueError, also for a large or irregular one."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as opened:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        _check_owner(file, state)
        # Who may write there may put another file in its place.
        for folder in {file.parent, file.resolve().parent}:
            _check_owner(folder, os.stat(folder))
        if state.st_size > MAX_SIZE:
            raise ValueError(f"it has more than {MAX_SIZE} bytes")
        return opened.read(MAX_SIZE).decode()


def _check_owner(path: Path, state: os.stat_result) -> None:
    """Raises ValueError if others could write the commands that are run as this user."""
    if state.st_uid not in (os.getuid(), ROOT):
        raise ValueError(
            f"{path} belongs to another user, whose commands are not run; make it your own with chown"
        )
    others = stat.S_IWOTH if _is_private(state.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    is_sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & others and not is_sticky:
        raise ValueError(
            f"others may write to {path}, and their commands are not run; chmod go-w {path}"
        )


def _is_private(group_id: int) -> bool:
    """True for a group of this user alone, which has its name where users have one each."""
    try:
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _entry(name: str, fields: Any, file: Path, text: str) -> ServerEntry:
    """Parse one entry. Raises ToolsError."""
    shown = one_line(name, 60)
    at = text.find(json.dumps(name, ensure_ascii=False))
    where = f'{file}, line {text.count(chr(10), 0, max(at, 0)) + 1}: the server "{shown}"'

    def wrong(what: str) -> ToolsError:
        return ToolsError(f"{where} {what}. Expected: {_EXAMPLE}")

    if not name.strip() or len(name) > 100:
        raise wrong("needs a name of 1 to 100 characters")
    if not isinstance(fields, dict):
        raise wrong("is not an object")
    _check_target(fields, wrong)
    _check_details(fields, wrong)
    folder = fields.get("cwd")
    return ServerEntry(
        name=name,
        command=fields.get("command", ""),
        args=tuple(fields.get("args", [])),
        env=fields.get("env", {}),
        folder=None if folder is None else os.path.expanduser(folder),
        url=fields.get("url", ""),
        headers=fields.get("headers", {}),
        call_seconds=float(fields.get("timeout", CALL_SECONDS)),
        is_disabled=fields.get("disabled") is True,
    )


def _check_target(fields: Mapping[str, Any], wrong: Callable[[str], ToolsError]) -> None:
    command, url = fields.get("command", ""), fields.get("url", "")
    if not isinstance(command, str) or not isinstance(url, str) or bool(command) == bool(url):
        raise wrong('needs either "command" or "url", as a text')
    if url and not url.startswith(("http://", "https://")):
        raise wrong('has a "url" that does not begin with http:// or https://')


def _check_details(fields: Mapping[str, Any], wrong: Callable[[str], ToolsError]) -> None:
    args, seconds = fields.get("args", []), fields.get("timeout", CALL_SECONDS)
    folder = fields.get("cwd")
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise wrong('has "args" that are not a list of texts')
    for field_name in ("env", "headers"):
        values = fields.get(field_name, {})
        if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
            raise wrong(f'has "{field_name}" whose values are not texts')
    if folder is not None and not isinstance(folder, str):
        raise wrong('has a "cwd" that is not a text')
    if not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_SECONDS:
        raise wrong(f'has a "timeout" that is not between 0 and {_MAX_SECONDS:.0f} seconds')
