"""Global states: streamed out, mapped in, sent leaf by leaf, and every damaged byte found."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from spes_p2p.core.roots import state_root
from spes_p2p.store.states import StateStore, map_state
from spes_protocols.codec import encode
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from spes_protocols.messages import SnapshotIndex, TensorIndex
from spes_protocols.types import LEAF_BYTES
from tests.unit.store_support import run, small_disk
from tests.vectors import generate

__all__ = ["small_disk"]

LONG = 2 * LEAF_BYTES // 4 + 3
SPECS = [("a", (2, 3)), ("b", (LONG,)), ("c.weight", (4,))]
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(LONG, dtype=np.float32),
    "c.weight": np.zeros(4, dtype=np.float32),
}


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "snapshots", SPECS)


def write(store: StateStore, round: int, arrays: dict[str, np.ndarray] = ARRAYS) -> SnapshotIndex:
    with store.writer(round) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        return writer.commit()


def test_a_state_is_written_and_mapped(store: StateStore) -> None:
    index = write(store, 5)
    assert store.rounds() == [5]
    assert store.index(5) == index
    assert [len(tensor.leaves) for tensor in index.tensors] == [1, 3, 1]
    state = store.read(5)
    assert list(state) == [name for name, _ in SPECS]
    for name, array in ARRAYS.items():
        assert np.array_equal(state[name], array)
        assert state[name].dtype == np.float32 and not state[name].flags.writeable
    assert store.verify(5) == state_root(index)
    assert len(os.listdir(store.directory)) == 2


def test_others_read_it_as_safetensors(store: StateStore) -> None:
    write(store, 0)
    loaded = safetensors.numpy.load_file(store.path(0))
    assert loaded.keys() == ARRAYS.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())


def test_the_root_is_that_of_the_golden_vector(tmp_path: Path) -> None:
    arrays = generate.example_tensors()
    store = StateStore(tmp_path, [(name, array.shape) for name, array in arrays.items()])
    assert write(store, 3, arrays) == generate.example_index()


def test_any_memory_order_gives_the_same_state(store: StateStore) -> None:
    twisted = ARRAYS | {"a": np.asfortranarray(ARRAYS["a"]), "b": np.repeat(ARRAYS["b"], 2)[::2]}
    assert write(store, 1, twisted).tensors == write(store, 2).tensors


def test_a_state_that_is_not_committed_leaves_nothing(store: StateStore) -> None:
    with store.writer(1) as writer:
        writer.add("a", ARRAYS["a"])
    assert os.listdir(store.directory) == []
    with store.writer(1) as writer, pytest.raises(AssertionError):
        writer.commit()
    with store.writer(1) as writer, pytest.raises(AssertionError, match="out of place"):
        writer.add("b", ARRAYS["b"])
    with store.writer(1) as writer, pytest.raises(AssertionError, match="float64"):
        writer.add("a", ARRAYS["a"].astype(np.float64))


def test_what_goes_while_it_is_counted_is_no_error(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, 1)
    write(store, 2)
    before = store.total_bytes()
    with os.scandir(store.directory) as entries:
        listed = list(entries)
    store.remove(1)
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(listed))
    assert 0 < store.total_bytes() < before


def test_a_round_is_replaced_and_readers_keep_theirs(store: StateStore) -> None:
    write(store, 1)
    before = store.read(1)
    write(store, 1, ARRAYS | {"c.weight": np.ones(4, dtype=np.float32)})
    assert store.read(1)["c.weight"].tolist() == [1, 1, 1, 1]
    assert before["c.weight"].tolist() == [0, 0, 0, 0]


def test_a_state_without_index_does_not_count(store: StateStore) -> None:
    write(store, 1)
    write(store, 12)
    store.index_path(1).unlink()
    assert store.rounds() == [12]
    store.remove(12)
    store.remove(1)
    assert os.listdir(store.directory) == []
    with pytest.raises(UserError, match="no snapshot of round 12"):
        store.index(12)
    with pytest.raises(UserError, match="no state at"):
        store.read(12)


@pytest.mark.parametrize(
    ("tensor", "at", "named"),
    [(0, 0, "tensor a, leaf 0"), (1, LEAF_BYTES + 9, "tensor b, leaf 1"), (1, 4 * LONG - 1, "tensor b, leaf 2")],
)
def test_a_flipped_bit_is_found_and_named(store: StateStore, tensor: int, at: int, named: str) -> None:
    write(store, 4)
    flip(store.path(4), store.layout.tensors[tensor].offset + at)
    with pytest.raises(IntegrityError, match=f"{named} differs") as caught:
        store.verify(4)
    assert caught.value.where == str(store.path(4))


def test_a_damaged_header_size_or_index_is_found(store: StateStore) -> None:
    write(store, 4)
    flip(store.path(4), 20)
    with pytest.raises(IntegrityError, match="header"):
        store.read(4)
    write(store, 4)
    with store.path(4).open("ab") as file:
        file.write(b"x")
    with pytest.raises(IntegrityError, match="bytes where"):
        map_state(store.path(4), SPECS)
    write(store, 4)
    for at in range(len(store.index_path(4).read_bytes())):
        flip(store.index_path(4), at)
        with pytest.raises(IntegrityError):
            store.index(4)
            store.verify(4)
        flip(store.index_path(4), at)
    store.verify(4)
    store.path(4).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        store.verify(4)


def flip(path: Path, at: int) -> None:
    """Flip the lowest bit of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_state_travels_leaf_by_leaf(store: StateStore, tmp_path: Path) -> None:
    index = write(store, 4)
    other = StateStore(tmp_path / "other", SPECS)
    receiver = other.receiver(index)
    assert receiver.missing() == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    for leaf in reversed(receiver.missing()):
        with pytest.raises(RemoteError) as caught:
            receiver.put(*leaf, b"x" + store.chunk(4, *leaf)[1:])
        assert caught.value.check == "blob_digest"
        with pytest.raises(RemoteError):
            receiver.put(*leaf, store.chunk(4, *leaf) + b"x")
        receiver.put(*leaf, store.chunk(4, *leaf))
    assert (receiver.missing(), other.rounds()) == ([], [])
    receiver.finish()
    assert other.rounds() == [4]
    assert other.path(4).read_bytes() == store.path(4).read_bytes()
    assert other.verify(4) == state_root(index)
    assert not other.partial(4).exists()


def test_a_receiver_goes_on_after_kill_9(store: StateStore, tmp_path: Path) -> None:
    index = write(store, 4)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom spes_p2p.store.states import StateStore\n"
        f"specs = {SPECS!r}\nsource, other = (StateStore(Path(path), specs) for path in sys.argv[1:])\n"
        "receiver = other.receiver(source.index(4))\n"
        "for leaf in [(0, 0), (1, 1), (1, 2)]:\n    receiver.put(*leaf, source.chunk(4, *leaf))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    other = StateStore(tmp_path / "other", SPECS)
    status, _ = run(code, store.directory, other.directory)
    assert status == -9
    flip(other.partial(4), other.layout.tensors[1].offset + 2 * LEAF_BYTES)  # a write that the crash tore
    receiver = other.receiver(index)
    # The last tensor is all zeros and so was the file: it is right without having been sent.
    assert receiver.missing() == [(1, 0), (1, 2)]
    with pytest.raises(AssertionError):
        receiver.finish()
    for leaf in receiver.missing():
        receiver.put(*leaf, store.chunk(4, *leaf))
    receiver.finish()
    assert other.verify(4) == state_root(index)


def test_an_index_of_another_model_is_refused(store: StateStore) -> None:
    index = write(store, 4)
    first, second, third = index.tensors
    for tensors in (
        (first, second),
        (first, third, second),
        (TensorIndex(name="a", shape=(3, 2), leaves=first.leaves), second, third),
        (first, TensorIndex(name="b", shape=second.shape, leaves=second.leaves[:2]), third),
    ):
        with pytest.raises(RemoteError) as caught:
            store.receiver(SnapshotIndex(round=9, tensors=tensors))
        assert caught.value.check == "shapes"
    store.index_path(4).write_bytes(encode(SnapshotIndex(round=5, tensors=index.tensors)))
    with pytest.raises(IntegrityError, match="round 5"):
        store.index(4)


def test_what_is_not_there_is_not_sent(store: StateStore) -> None:
    write(store, 4)
    for tensor, leaf in ((-1, 0), (3, 0), (0, 1), (1, 3), (1, -1)):
        with pytest.raises(RemoteError, match="no leaf"):
            store.chunk(4, tensor, leaf)
    with pytest.raises(RemoteError, match="no snapshot of round 5"):
        store.chunk(5, 0, 0)


def test_a_full_disk_is_noticed_before_anything_is_written(small_disk: Path, store: StateStore) -> None:
    small = StateStore(small_disk / "snapshots", SPECS)
    with pytest.raises(UserError, match="disk full"):
        write(small, 1)
    with pytest.raises(UserError, match="disk full"):
        small.receiver(write(store, 1))
    assert os.listdir(small.directory) == []


def test_a_size_limit_leaves_no_half_written_state(store: StateStore) -> None:
    code = (
        "import resource, sys\nimport numpy as np\nfrom pathlib import Path\n"
        "from spes_p2p.store.states import StateStore\n"
        "from spes_protocols.errors import UserError\nresource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "store = StateStore(Path(sys.argv[1]), [('a', (2**18,))])\n"
        "try:\n    with store.writer(1) as writer:\n        writer.add('a', np.ones(2**18, dtype=np.float32))\n"
        "        writer.commit()\nexcept UserError as error:\n    print(error)"
    )
    status, out = run(code, store.directory)
    assert status == 0 and "disk full" in out
    assert os.listdir(store.directory) == []
