"""Small Python programs in processes of their own, for tests of what processes do to one another and to the disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run `code` as a program with text pipes; `sys.argv[1:]` are the arguments."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def run(code: str, *arguments: object) -> tuple[int, str]:
    """Run `code` to its end; its exit status (negative for a signal) and output."""
    child = start(code, *arguments)
    out, errors = child.communicate()
    assert not errors, errors
    return child.returncode, out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Only root can mount one; `RLIMIT_FSIZE` in a child stands in for it elsewhere."""
    path = tmp_path / "small disk"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system takes rights that this user lacks")
    yield path
    subprocess.run(["umount", path], check=True)
