"""Downloads of states: resumed by what is noted, made of what other states here have, never trusting either."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.core.roots import state_root
from spes_p2p.store import receiver as receivers
from spes_p2p.store.states import StateStore
from spes_protocols.errors import UserError
from spes_protocols.messages import SnapshotIndex
from spes_protocols.types import LEAF_BYTES
from tests.unit.store_support import run, small_disk

__all__ = ["small_disk"]

LEAVES = 20
SPECS = [("a", (3,)), ("b", (LEAVES * LEAF_BYTES // 4,))]


def arrays(seed: int, changed: range = range(LEAVES)) -> dict[str, np.ndarray]:
    """A state; those of two seeds differ in the `changed` leaves of `b` alone."""
    b = np.random.default_rng(0).random(LEAVES * LEAF_BYTES // 4, dtype=np.float32)
    for leaf in changed:
        b[leaf * LEAF_BYTES // 4] = seed + leaf
    return {"a": np.zeros(3, np.float32), "b": b}


def write(store: StateStore, round: int, tensors: dict[str, np.ndarray]) -> SnapshotIndex:
    with store.writer(round) as writer:
        for name, array in tensors.items():
            writer.add(name, array)
        return writer.commit()


@pytest.fixture
def source(tmp_path: Path) -> StateStore:
    """A store with S_4."""
    store = StateStore(tmp_path / "source", SPECS)
    write(store, 4, arrays(1))
    return store


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the leaves that receivers hash from now on."""
    sizes: list[int] = []
    honest = receivers.leaf_digest

    def counting(data: bytes) -> bytes:
        sizes.append(len(data))
        return honest(data)

    monkeypatch.setattr(receivers, "leaf_digest", counting)
    return sizes


KILLED_AFTER = """
import os, signal, sys
from pathlib import Path
from spes_p2p.store import receiver
from spes_p2p.store.states import StateStore
receiver.SYNC_BYTES = int(sys.argv[3])
source, other = (StateStore(Path(path), {specs!r}) for path in sys.argv[1:3])
taker = other.receiver(source.index(4))
for leaf in taker.missing()[1:16]:
    taker.put(*leaf, source.chunk(4, *leaf))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_only_what_was_not_noted_is_hashed_again(
    source: StateStore, tmp_path: Path, hashed: list[int]
) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    status, _ = run(KILLED_AFTER.format(specs=SPECS), source.directory, other.directory, 6 * LEAF_BYTES)
    assert status == -9
    hashed.clear()
    taker = other.receiver(source.index(4))
    # 15 leaves came and 12 were noted. The next one shares a page with the last; of the holes one is hashed for all.
    assert len(taker.missing()) == LEAVES - 15
    assert hashed.count(LEAF_BYTES) == 3 + 1 + 1
    assert taker.bytes_missing == (LEAVES - 15) * LEAF_BYTES
    for leaf in taker.missing():
        taker.put(*leaf, source.chunk(4, *leaf))
    taker.finish()
    assert other.verify(4) == source.root(4)
    assert sorted(os.listdir(other.directory)) == ["4.index", "4.safetensors"]


def test_what_was_noted_survives_a_lost_note(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    assert run(KILLED_AFTER.format(specs=SPECS), source.directory, other.directory, 6 * LEAF_BYTES)[0] == -9
    for damage in (b"", b"\xff" * 40):
        other.arrived_path(4).write_bytes(damage)
        assert len(other.receiver(source.index(4)).missing()) == LEAVES - 15
    other.arrived_path(4).unlink()
    assert len(other.receiver(source.index(4)).missing()) == LEAVES - 15


def test_notes_of_another_state_of_that_round_are_not_believed(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    taker = other.receiver(source.index(4))
    for leaf in taker.missing():
        taker.put(*leaf, source.chunk(4, *leaf))
    taker.close()
    changed = arrays(1)["b"]
    changed[: 3 * LEAF_BYTES // 4] = 0
    index = write(StateStore(tmp_path / "reset", SPECS), 4, arrays(1) | {"b": changed})
    assert other.receiver(index).missing() == [(1, 0), (1, 1), (1, 2)]


def test_notes_of_a_file_that_is_gone_are_not_believed(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    taker = other.receiver(source.index(4))
    for leaf in taker.missing():
        taker.put(*leaf, source.chunk(4, *leaf))
    taker.close()
    other.partial(4).unlink()
    everything = [(0, 0), *((1, leaf) for leaf in range(LEAVES))]
    assert other.receiver(source.index(4)).missing() == everything
    assert other.receiver(source.index(4)).missing() == everything[1:], "the hole is the zeros of `a`"


def test_a_download_that_only_lacked_its_index_is_not_fetched_again(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    os.link(source.path(4), other.path(4))
    taker = other.receiver(source.index(4))
    assert taker.missing() == []
    taker.finish()
    assert other.verify(4) == source.root(4)


def test_leaves_of_older_states_and_downloads_are_copied(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    write(other, 2, arrays(1, range(5, LEAVES)))  # the first five differ from S_4
    begun = other.receiver(write(StateStore(tmp_path / "third", SPECS), 3, arrays(1, range(3, LEAVES))))
    begun.put(1, 3, source.chunk(4, 1, 3))  # of an unfinished S_3
    begun.close()
    taker = other.receiver(source.index(4))
    assert taker.reuse() == (LEAVES - 4) * LEAF_BYTES + 12
    assert taker.missing() == [(1, 0), (1, 1), (1, 2), (1, 4)]


def test_a_damaged_leaf_of_an_older_state_is_not_copied(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    write(other, 2, arrays(1))
    with other.path(2).open("r+b") as file:
        file.seek(other.layout.tensors[1].offset + 7 * LEAF_BYTES + 5)
        file.write(b"\x99\x99\x99")
    taker = other.receiver(source.index(4))
    taker.reuse()
    assert taker.missing() == [(1, 7)]


def test_room_for_the_next_state_is_asked_for_too(
    source: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * source.layout.file_bytes - len(source.layout.header)
    usage = type("Usage", (), {"free": needed - 1})
    monkeypatch.setattr("spes_p2p.store.files.shutil.disk_usage", lambda path: usage)
    other = StateStore(tmp_path / "other", SPECS)
    with pytest.raises(UserError, match=rf"needs {needed / 2**20:.1f} MiB but"):
        other.receiver(source.index(4))
    assert os.listdir(other.directory) == []
    usage.free += 1  # type: ignore[attr-defined]
    assert other.receiver(source.index(4)).missing()


def test_roots_are_read_once_and_again_when_the_index_changes(source: StateStore) -> None:
    index = source.index(4)
    assert source.root(4) == state_root(index)
    changed = write(source, 4, arrays(7))
    assert source.root(4) == state_root(changed) != state_root(index)
    with pytest.raises(UserError, match="no snapshot of round 9"):
        source.root(9)


def test_the_bytes_on_disk_and_those_lacking(source: StateStore, tmp_path: Path) -> None:
    other = StateStore(tmp_path / "other", SPECS)
    root = source.root(4)
    assert other.bytes_lacking(4, root) == other.layout.file_bytes
    taker = other.receiver(source.index(4))
    assert other.total_bytes() < LEAF_BYTES, "the file is sparse"
    for leaf in taker.missing()[:6]:
        taker.put(*leaf, source.chunk(4, *leaf))
    taker.close()
    assert 5 * LEAF_BYTES <= other.total_bytes() < 6 * LEAF_BYTES
    assert other.bytes_lacking(4, root) == (LEAVES - 5) * LEAF_BYTES
    assert other.bytes_lacking(4, bytes(32)) == other.layout.file_bytes
    other.remove_partials(range(5))
    assert os.listdir(other.directory) == []
