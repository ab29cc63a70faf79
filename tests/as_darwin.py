"""A pytest plugin: tests are collected as on macOS, without what only Linux has.

    python -m pytest -p tests.as_darwin --collect-only -q

A test that reads such a name when its file is imported, in a decorator or a parameter, ends the whole run on a Mac
before its first test. Nothing is run: packages with extensions of their own are those of this machine.
"""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

# Of modules that both systems have.
LINUX_ONLY = {
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_GETPIPE_SZ F_NOTIFY F_SEAL_SHRINK F_SETPIPE_SZ",
    "mmap": "MADV_HUGEPAGE MADV_NOHUGEPAGE MAP_POPULATE MAP_STACK",
    "os": """
        O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE copy_file_range eventfd eventfd_read
        eventfd_write fdatasync getrandom getresgid getresuid getxattr listxattr memfd_create pidfd_open
        pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity sched_getparam
        sched_getscheduler sched_param sched_rr_get_interval sched_setaffinity sched_setparam
        sched_setscheduler setresgid setresuid setxattr splice
    """,
    "resource": """
        RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING
        RUSAGE_THREAD prlimit
    """,
    "select": """
        EPOLLERR EPOLLET EPOLLHUP EPOLLIN EPOLLONESHOT EPOLLOUT EPOLLPRI EPOLLRDHUP EPOLL_CLOEXEC epoll
    """,
    "signal": """
        SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo
    """,
    "socket": """
        AF_ALG AF_NETLINK AF_PACKET SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_DOMAIN SO_MARK
        SO_PEERCRED SO_PROTOCOL TCP_CORK TCP_DEFER_ACCEPT TCP_INFO TCP_LINGER2 TCP_QUICKACK TCP_SYNCNT
        TCP_USER_TIMEOUT TCP_WINDOW_CLAMP
    """,
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
}
# They ask for the system when they are imported, and then for extensions that only a Mac has.
_OF_THIS_MACHINE = """
    anthropic asyncio httpx httpx2 huggingface_hub hypothesis mcp mlx_vlm multiprocessing ollama openai
    playwright.sync_api psutil schemathesis ssl subprocess textual transformers typer urllib.request uvicorn
"""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    from mlxserve.system.machine import import_mlx_lm

    import_mlx_lm()
    for package in _OF_THIS_MACHINE.split():
        import_module(package)
    for module, names in LINUX_ONLY.items():
        for name in names.split():
            vars(import_module(module)).pop(name, None)
    sys.platform = "darwin"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        raise pytest.UsageError("tests.as_darwin needs --collect-only")
