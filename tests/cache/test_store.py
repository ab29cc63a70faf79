"""Pages on disk are read back exactly as they were written, or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxserve.cache import store as store_module
from mlxserve.cache.store import LoadedPages, PageStore
from mlxserve.errors import InvalidConfig

HASHES = [bytes([n]) * 16 for n in range(8)]
PAYLOADS = [bytes([100 + n]) * 1000 for n in range(8)]
RECORD = 1000 + store_module.HEADER.size


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., PageStore]]:
    stores: list[PageStore] = []

    def make(limit: int = 1 << 20, model: str = "a model") -> PageStore:
        stores.append(PageStore(tmp_path / "swap", limit=limit, model=model))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def load(store: PageStore, key: str, first: int, hashes: list[bytes]) -> list[bytes]:
    store.load(key, first, hashes)
    while not (loaded := store.poll()):
        store.wait(60)
    (run,) = loaded
    assert (run.key, run.first) == (key, first)
    return list(run.payloads)


def file_of(store: PageStore, key: str) -> Path:
    """Its file, after all earlier calls have been carried out."""
    load(store, "nothing", 0, [])
    return store.folder / f"{key}.pages"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class StalledDisk:
    """A file of the store that is a pipe: opening it blocks the store's thread until `resume`."""

    key = "stalled"

    def __init__(self, store: PageStore) -> None:
        self._path = store.folder / f"{self.key}.pages"
        os.mkfifo(self._path, 0o600)

    def resume(self) -> None:
        with self._path.open("rb") as pipe:
            while pipe.read(1 << 16):
                pass


def test_a_run_is_read_as_it_was_written_in_whole_or_in_part(make: Callable) -> None:
    store = make()
    assert store.save("a", 3, HASHES, PAYLOADS) == len(PAYLOADS)
    assert load(store, "a", 3, HASHES) == PAYLOADS
    assert load(store, "a", 5, HASHES[2:4]) == PAYLOADS[2:4]


def test_a_run_can_be_written_in_several_calls(make: Callable) -> None:
    store = make()
    assert store.save("a", 0, HASHES[:5], PAYLOADS[:5])
    assert store.save("a", 5, HASHES[5:], PAYLOADS[5:])
    assert load(store, "a", 0, HASHES) == PAYLOADS
    assert store.num_bytes == 8 * RECORD == file_of(store, "a").stat().st_size


def test_files_are_readable_by_their_owner_only(make: Callable) -> None:
    store = make()
    store.save("a", 0, HASHES, PAYLOADS)
    assert stat.S_IMODE(file_of(store, "a").stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / "lock").stat().st_mode) == 0o600


def test_dropping_a_run_deletes_its_file_and_frees_its_space(make: Callable) -> None:
    store = make(limit=8 * RECORD)
    store.save("a", 0, HASHES, PAYLOADS)
    store.drop("a")
    store.drop("never saved")
    assert not file_of(store, "a").exists()
    assert store.num_bytes == 0
    assert load(store, "a", 0, HASHES) == []
    assert store.save("b", 0, HASHES, PAYLOADS)


@pytest.mark.parametrize("position", [0, 9, 20, 30, 50, 70, RECORD - 1])
def test_a_changed_byte_ends_the_run_before_its_page(
    make: Callable, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    store.save("a", 0, HASHES, PAYLOADS)
    with file_of(store, "a").open("r+b") as file:
        file.seek(2 * RECORD + position)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert load(store, "a", 0, HASHES) == PAYLOADS[:2]
    assert "page 2 is damaged or foreign" in caplog.text
    assert load(store, "a", 3, HASHES[3:]) == PAYLOADS[3:]


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD, 2 * RECORD + 30])
def test_the_whole_pages_of_a_truncated_file_are_read(
    make: Callable, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    store.save("a", 0, HASHES, PAYLOADS)
    os.truncate(file_of(store, "a"), size)
    assert load(store, "a", 0, HASHES) == PAYLOADS[: size // RECORD]
    assert "is cut off" in caplog.text


def test_nothing_is_read_from_a_lost_file(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    store = make()
    store.save("a", 0, HASHES, PAYLOADS)
    file_of(store, "a").unlink()
    assert load(store, "a", 0, HASHES) == []
    assert "computed again" in caplog.text


def test_pages_of_another_model_hash_or_index_are_not_read(make: Callable) -> None:
    mine, other = make(), make(model="another model")
    for store in (mine, other):
        store.save("a", 0, HASHES, PAYLOADS)
    file_of(other, "a").write_bytes(file_of(mine, "a").read_bytes())
    assert load(other, "a", 0, HASHES) == []
    assert load(mine, "a", 0, [HASHES[0], HASHES[5]]) == PAYLOADS[:1]
    records = file_of(mine, "a").read_bytes()
    file_of(mine, "a").write_bytes(records[RECORD:] + records[:RECORD])
    assert load(mine, "a", 0, HASHES) == []


def test_beyond_the_limit_the_first_pages_are_kept_and_one_warning_is_logged(
    make: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(limit=5 * RECORD + 100)
    assert store.save("a", 0, HASHES, PAYLOADS) == 5
    assert store.save("b", 0, HASHES, PAYLOADS) == 0
    assert load(store, "a", 0, HASHES) == PAYLOADS[:5]
    assert load(store, "b", 0, HASHES) == []
    (line,) = [
        r.message for r in caplog.records if "swap_space" in r.message and "Raise" in r.message
    ]
    assert "PreemptionMode.RECOMPUTE" in line
    store.drop("a")
    file_of(store, "a")
    assert store.save("c", 0, HASHES, PAYLOADS) == 5
    assert load(store, "c", 0, HASHES) == PAYLOADS[:5]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing fails beyond it, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_no_partial_file_and_is_logged_once(
    make: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(limit=1 << 30)
    payloads = [bytes(1 << 20)] * len(HASHES)
    with file_size_limit(3 << 20):
        for key in "ab":
            store.save(key, 0, HASHES, payloads)
            assert load(store, key, 0, HASHES[:1]) == []
            assert not file_of(store, key).exists()
    assert store.num_bytes == 0
    assert len([r for r in caplog.records if "File too large" in r.message]) == 1
    assert store.save("c", 0, HASHES, payloads)
    assert load(store, "c", 0, HASHES) == payloads


def test_saving_more_than_may_be_staged_waits_for_the_disk(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "STAGED_BYTES", 2500)
    monkeypatch.setattr(store_module, "STAGING_SECONDS", 60.0)
    store = make()
    disk = StalledDisk(store)
    assert store.save(disk.key, 0, HASHES[:2], PAYLOADS[:2])
    with ThreadPoolExecutor(1) as threads:
        saved = threads.submit(store.save, "a", 0, HASHES[:1], PAYLOADS[:1])
        with pytest.raises(TimeoutError):
            saved.result(0.1)
        disk.resume()
        assert saved.result(60)
    assert load(store, "a", 0, HASHES[:1]) == PAYLOADS[:1]


def test_a_stalled_disk_is_waited_for_once_until_it_writes_again(
    make: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "STAGED_BYTES", 100)
    monkeypatch.setattr(store_module, "STAGING_SECONDS", 0.01)
    store = make()
    disk = StalledDisk(store)
    assert store.save(disk.key, 0, HASHES[:1], PAYLOADS[:1])
    assert not store.save("a", 0, HASHES, PAYLOADS)
    assert "too slow" in caplog.text
    monkeypatch.setattr(store_module, "STAGING_SECONDS", 600.0)
    assert not store.save("b", 0, HASHES, PAYLOADS)  # at once
    disk.resume()
    file_of(store, "b")
    assert store.save("c", 0, HASHES, PAYLOADS)
    assert load(store, "c", 0, HASHES) == PAYLOADS


def test_closing_does_not_wait_for_a_stalled_disk(
    make: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "CLOSING_SECONDS", 0.01)
    store = make(limit=1 << 30)
    pipe = store.folder / "a.pages"
    os.mkfifo(pipe)
    store.save("a", 0, HASHES, [bytes(1 << 20)] * len(HASHES))  # more than fits into a pipe
    with pipe.open("rb"):  # open once the store's thread has opened it too
        store.close()
        assert "The disk does not answer" in caplog.text
        assert store.folder.exists()
    wait_until(lambda: not store.folder.exists())


def test_closing_removes_the_folder_and_is_idempotent(make: Callable) -> None:
    store = make()
    store.save("a", 0, HASHES, PAYLOADS)
    folder = store.folder
    store.close()
    store.close()
    assert not folder.exists()
    assert not any(folder.parent.iterdir())


def test_stores_in_one_folder_do_not_affect_each_other(make: Callable) -> None:
    first = make()
    first.save("a", 0, HASHES, PAYLOADS)
    second = make()
    second.save("a", 0, HASHES, PAYLOADS[::-1])
    assert load(first, "a", 0, HASHES) == PAYLOADS
    assert load(second, "a", 0, HASHES) == PAYLOADS[::-1]


def test_files_of_a_killed_process_are_removed_at_the_next_start(
    tmp_path: Path, make: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from mlxserve.cache.store import PageStore\n"
        "store = PageStore(Path(sys.argv[1]), limit=1 << 40, model='m')\n"
        "print(store.folder, flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    store.save(str(n), 0, [b'h' * 16] * 8, [bytes(1 << 16)] * 8)\n"
        "    n += 1\n"
        "    if n == 20: print('writing', flush=True)\n"
        "    if n % 20 == 0: [store.drop(str(k)) for k in range(n - 20, n - 1)]\n"
    )
    base = tmp_path / "swap"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(base)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert child.stdout.readline() == "writing\n"
        make()  # keeps the folders of running processes
        assert folder.exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert any(folder.iterdir())
    caplog.set_level(logging.INFO)
    store = make()
    assert not folder.exists()
    assert "were removed" in caplog.text
    assert store.folder.exists()


def test_the_error_names_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidConfig, match=r"file/swap cannot be used.*another swap_dir"):
        PageStore(tmp_path / "file" / "swap", limit=1, model="m")


def test_a_run_that_was_never_saved_is_empty(make: Callable) -> None:
    store = make()
    store.load("unknown", 4, HASHES)
    store.wait(60)
    assert store.poll() == [LoadedPages("unknown", 4, ())]
    assert store.poll() == []


def test_other_processes_see_the_lock(make: Callable) -> None:
    store = make()
    with (store.folder / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
