"""What the stores do outside a round, stopped or failed at each effect: a blob and a state that come from others.

What is there afterwards is whole or counts for nothing, and doing it again comes to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.core.roots import state_root
from spes_p2p.store import receiver
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.files import remove_unfinished
from spes_p2p.store.states import StateStore
from spes_protocols.codec import sha256
from spes_protocols.errors import RemoteError, UserError
from spes_protocols.messages import SnapshotIndex
from tests.crash.faults import Faults, Kind, Stopped
from tests.crash.lives import faulty

SPECS = [("a", (300,)), ("b", (20, 20)), ("c", (7,))]
DATA = bytes(range(256)) * 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[StateStore, SnapshotIndex]:
    """Somebody who has the state of round 3."""
    store = StateStore(tmp_path_factory.mktemp("source"), SPECS)
    with store.writer(3) as writer:
        for number, (name, shape) in enumerate(SPECS):
            writer.add(name, np.full(shape, number + 0.5, np.float32))
        return store, writer.commit()


class Stores:
    """Those of one life, in one directory."""

    def __init__(self, folder: Path) -> None:
        self.blobs, self.states = BlobStore(folder), StateStore(folder, SPECS)


def receive_blob(stores: Stores, source: tuple[StateStore, SnapshotIndex]) -> None:
    """A download is finished and adopted."""
    blobs = stores.blobs
    if not blobs.has(sha256(DATA)):
        blobs.partial(sha256(DATA)).write_bytes(DATA)
        blobs.adopt(sha256(DATA))


def receive_state(stores: Stores, source: tuple[StateStore, SnapshotIndex]) -> None:
    """A state comes leaf by leaf."""
    other, index = source
    if 3 not in stores.states.rounds():
        taken = stores.states.receiver(index)
        try:
            for tensor, leaf in taken.missing():
                taken.put(tensor, leaf, other.chunk(3, tensor, leaf))
            taken.finish()
        finally:
            taken.close()


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower().replace("_", " "))
@pytest.mark.parametrize("work", [receive_blob, receive_state], ids=lambda work: work.__name__)
def test_what_comes_from_others_is_whole_or_counts_for_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: tuple[StateStore, SnapshotIndex],
    work: Callable[[Stores, tuple[StateStore, SnapshotIndex]], None],
    kind: Kind,
) -> None:
    monkeypatch.setattr(receiver, "SYNC_BYTES", 1000)

    def attempt(number: int) -> Faults:
        here = tmp_path / str(number)
        (here / "1").mkdir(parents=True)
        faults = Faults(here / "1", here / "left", kind, number) if number else Faults(here / "1", here / "left")
        with faulty(faults):
            stores = Stores(here / "1")
            for _ in range(kind.failures + 2):  # a peer tries again, until the program ends
                try:
                    work(stores, source)
                    break
                except Stopped:
                    break
                except (UserError, RemoteError):
                    assert number
        faults.end()
        return faults

    count = len(attempt(0).effects)
    assert count > 1
    for number in range(1, count + 1):
        faults = attempt(number)
        for left in filter(Path.exists, (faults.killed, faults.cut)):
            check_whole(left, source[1])
            remove_unfinished(left)
            work(Stores(left), source)
            check_whole(left, source[1])
            StateStore(left, SPECS).remove_partials(range(4))  # as a peer does in the following round
            names = {path.name for path in left.iterdir()}
            assert names in ({sha256(DATA).hex()}, {"3.index", "3.safetensors"}), (number, faults.effects)


def check_whole(folder: Path, index: SnapshotIndex) -> None:
    """Whatever counts here is what it should be."""
    blobs, states = BlobStore(folder), StateStore(folder, SPECS)
    for digest in blobs.digests():
        blobs.verify(digest)
    for number in states.rounds():
        assert states.verify(number) == state_root(index)
