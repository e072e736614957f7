"""The cache: made once, bounded, least recently used first, never what is in use, across threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spes_p2p.data.cache import Cache, CacheFullError, disk_errors, publish, scratch_file
from spes_protocols.errors import UserError


def name(number: int) -> str:
    return f"{number:064x}.npy"


def put(cache: Cache, number: int, size: int = 100) -> None:
    def make(part: Path, path: Path) -> None:
        part.write_bytes(b"x" * size)
        publish(part, path)

    with cache.hold(name(number), size, make) as path:
        assert path.stat().st_size == size
    os.utime(path, ns=(number, number))  # used in the order of the numbers


def must_not_make(part: Path, path: Path) -> None:
    raise AssertionError(f"{path} is there already")


def there(cache: Cache) -> list[int]:
    return sorted(int(path.name.partition(".")[0], 16) for path in cache.folder.iterdir())


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    for number in (1, 2, 3):
        put(cache, number)
    with cache.hold(name(1), 100, must_not_make):
        pass  # now the most recently used
    put(cache, 4)
    assert there(cache) == [1, 3, 4]
    put(cache, 5, 200)
    assert there(cache) == [1, 5]


def test_what_is_in_use_stays_until_it_is_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    for number in (1, 2, 3):
        put(cache, number)
    with cache.hold(name(1), 100, must_not_make), cache.hold(name(2), 100, must_not_make):
        put(cache, 4)
        assert there(cache) == [1, 2, 4]
        with pytest.raises(CacheFullError, match="allow at least 400 bytes") as caught:
            put(cache, 5, 200)
        assert isinstance(caught.value, UserError)
    put(cache, 5, 200)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 300


def test_what_another_process_uses_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 200)
    put(cache, 1)
    put(cache, 2)
    holder = (
        "import sys; from pathlib import Path; from spes_p2p.data.cache import Cache\n"
        "with Cache(Path(sys.argv[1]), 200).hold(sys.argv[2], 100, print): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path), name(1)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        put(cache, 3)
        assert there(cache) == [1, 3]
        process.kill()
    os.utime(tmp_path / name(1), ns=(1, 1))
    put(cache, 4)
    assert there(cache) == [3, 4]


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x" * 1000)
    cache = Cache(tmp_path, 100)
    put(cache, 1)
    put(cache, 2)
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / name(1)).exists()


def test_abandoned_beginnings_count_and_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    (tmp_path / f"{name(7)}.part").write_bytes(b"x" * 150)
    (tmp_path / f"{name(8)}.tmp").write_bytes(b"x" * 150)
    put(cache, 1, 200)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".tmp"] == [name(1)]


def test_a_failed_make_keeps_its_part_and_is_tried_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)

    def broken(part: Path, path: Path) -> None:
        part.write_bytes(b"begin")
        raise UserError("cut")

    def finish(part: Path, path: Path) -> None:
        assert part.read_bytes() == b"begin"
        part.write_bytes(b"beginning")
        publish(part, path)

    with pytest.raises(UserError, match="cut"), cache.hold(name(1), 9, broken):
        pass
    with cache.hold(name(1), 9, finish) as path:
        assert path.read_bytes() == b"beginning"
    assert there(cache) == [1]


def test_two_threads_that_need_the_same_file_make_it_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    made: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def make(part: Path, path: Path) -> None:
        made.append(threading.current_thread().name)
        started.set()
        assert go_on.wait(10)
        part.write_bytes(b"x")
        publish(part, path)

    def use() -> None:
        with cache.hold(name(1), 1, make) as path:
            assert path.read_bytes() == b"x"

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name(1)]


def test_the_wait_for_another_is_bounded(tmp_path: Path) -> None:
    patient, hasty = Cache(tmp_path, 300), Cache(tmp_path, 300, wait_seconds=0.1)

    def make(part: Path, path: Path) -> None:
        with pytest.raises(UserError, match="in use by another process"), hasty.hold(name(1), 1, must_not_make):
            pass
        publish(part, path)

    with patient.hold(name(1), 1, make):
        pass


def test_a_file_being_written_is_not_evicted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    with scratch_file(tmp_path / name(9)) as file:
        file.write(b"x" * 150)
        file.flush()
        with pytest.raises(CacheFullError):
            put(cache, 1, 200)
        publish(Path(file.name), tmp_path / name(9))
    put(cache, 1, 200)
    assert there(cache) == [1]


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="check the directory"):
        Cache(tmp_path / "file" / "cache", 100)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="disk full while writing"), disk_errors(tmp_path):
        Path("/dev/full").open("wb", buffering=0).write(b"x")  # noqa: SIM115


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 300)
    for number in (1, 2, 3):
        put(cache, number)
    with cache.hold(name(1), 100, must_not_make):
        os.utime(tmp_path / name(1), ns=(1, 1))
        assert there(Cache(tmp_path, 250)) == [1, 3]
        assert there(Cache(tmp_path, 50)) == [1]
