"""Atomic files: whole or not at all, also when the disk is full."""

import os
from pathlib import Path

import pytest

from spes_p2p.store.files import NewFile, atomic_write, remove_unfinished, require_space
from spes_protocols.errors import UserError
from tests.unit.store_support import run, small_disk

__all__ = ["small_disk"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    atomic_write(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), NewFile(tmp_path) as file:
        file.write(b"data")
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_full_disk_keeps_the_old_file(small_disk: Path) -> None:
    path = small_disk / "file"
    atomic_write(path, b"old")
    with pytest.raises(UserError, match="disk full while writing"):
        atomic_write(path, bytes(2**21))
    assert path.read_bytes() == b"old"
    assert os.listdir(small_disk) == ["file"]
    with pytest.raises(UserError, match=r"needs 2\.0 MiB"):
        require_space(small_disk, 2**21)


def test_a_size_limit_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom spes_p2p.store.files import atomic_write\n"
        "from spes_protocols.errors import UserError\nresource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    atomic_write(Path(sys.argv[1]), bytes(2**20))\nexcept UserError as error:\n    print(error)"
    )
    status, out = run(code, path)
    assert status == 0 and "disk full while writing" in out
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        atomic_write(tmp_path / "file", b"data")
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom spes_p2p.store.files import NewFile\n"
        "with NewFile(Path(sys.argv[1])) as file:\n    file.write(b'half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    atomic_write(tmp_path / "kept", b"")
    status, _ = run(code, tmp_path)
    assert status == -9 and len(os.listdir(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["kept"]
