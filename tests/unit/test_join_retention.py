"""What goes first when the disk that a peer may use is full, what never goes, and a limit that is too small."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spes_p2p.peer.leftovers import named_blobs
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.program import open_peer
from spes_p2p.peer.retention import SERVED_MAX, SERVED_SECONDS, Retention, bytes_needed, require_quota
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.states import StateStore
from spes_protocols.errors import UserError
from tests.unit.join_support import play_rounds
from tests.unit.log_support import RunLog

ROUNDS = 6


class Kept:
    """The stores of a peer after six rounds, every state and blob still there, and a clock that the test moves."""

    def __init__(self, folder: Path, log: RunLog) -> None:
        self.log = log
        self.states = StateStore(folder / "states", [(e.name, e.shape) for e in log.states.layout.tensors])
        self.blobs = BlobStore(folder / "blobs")
        for number in range(ROUNDS + 1):
            with self.states.writer(number) as writer:
                for name, array in log.states.read(number).items():
                    writer.add(name, array)
                writer.commit()
        for digest in log.blobs.digests():
            self.blobs.put(log.blobs.path(digest))
        self.now = 0.0
        self.said: list[str] = []
        self.folder = folder
        self.retention = self.retain(10**12)

    def retain(self, quota: int, role: str = "volunteer", snapshot_rounds: int = 1) -> Retention:
        options = PeerOptions(
            home=self.folder, disk_bytes_max=quota, role=role, snapshot_rounds=snapshot_rounds
        )  # fmt: skip
        self.retention = Retention(
            self.log.chain, self.states, self.blobs, options, log=self.said.append, clock=lambda: self.now
        )
        return self.retention

    @property
    def used(self) -> int:
        return self.states.total_bytes() + self.blobs.total_bytes()

    @property
    def rounds_with_blobs(self) -> list[int]:
        return [n for n in range(ROUNDS) if any(map(self.blobs.has, named_blobs(self.log.chain, (n,))))]

    def gone_in_order(self, **options: str) -> list[str]:
        """What goes, one after another, as the limit sinks below what is used."""
        order: list[str] = []
        while True:
            before = self.what_is_there()
            kept = self.retain(self.used - 1, **options)  # type: ignore[arg-type]
            for round_number in self.served:
                kept.asked_for(round_number)
            kept.tidy()
            gone = before - self.what_is_there()
            if not gone:
                return order
            assert len(gone) == 1, "no more goes than must"
            order += gone

    served: tuple[int, ...] = ()

    def what_is_there(self) -> set[str]:
        return {f"state {n}" for n in self.states.rounds()} | {f"blobs {n}" for n in self.rounds_with_blobs}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    return play_rounds(tmp_path_factory.mktemp("log"), ROUNDS)


@pytest.fixture
def kept(tmp_path: Path, log: RunLog) -> Kept:
    return Kept(tmp_path, log)


def test_old_states_go_first_then_old_blobs_and_never_the_rest(kept: Kept) -> None:
    assert kept.gone_in_order() == [*(f"state {n}" for n in range(5)), *(f"blobs {n}" for n in range(5))]
    assert kept.what_is_there() == {"state 5", "state 6", "blobs 5"}
    assert any("nothing else may go" in line for line in kept.said)


def test_a_state_that_is_being_fetched_goes_after_blobs_that_are_older(kept: Kept) -> None:
    kept.served = (2,)
    assert kept.gone_in_order() == [
        "state 0", "state 1", "state 3", "state 4", "blobs 0", "blobs 1", "state 2", "blobs 2", "blobs 3", "blobs 4",
    ]  # fmt: skip


def test_an_archive_keeps_every_blob(kept: Kept) -> None:
    assert kept.gone_in_order(role="archive") == [f"state {n}" for n in range(5)]
    assert kept.rounds_with_blobs == list(range(ROUNDS))
    assert any("an archive keeps every blob" in line for line in kept.said)


def test_within_the_limit_only_irregular_states_go(kept: Kept) -> None:
    kept.retain(10**12, snapshot_rounds=3).tidy()
    assert kept.states.rounds() == [0, 3, 5, 6]
    assert kept.rounds_with_blobs == list(range(ROUNDS))
    assert kept.said == []


def test_a_state_that_is_being_fetched_stays_for_a_while(kept: Kept) -> None:
    kept.retain(10**12, snapshot_rounds=3)
    for round_number in (1, 2, 4):
        kept.retention.asked_for(round_number)
    kept.retention.tidy()
    assert kept.states.rounds() == [0, 1, 2, 3, 5, 6], f"no more than {SERVED_MAX} are kept for that"
    kept.now += SERVED_SECONDS - 1
    kept.retention.asked_for(2)
    kept.now += 2
    kept.retention.tidy()
    assert kept.states.rounds() == [0, 2, 3, 5, 6]


def test_states_that_are_not_the_ledgers_are_not_among_the_newest(kept: Kept) -> None:
    with kept.states.writer(6) as writer:  # what a fork left
        for name, array in kept.log.states.read(0).items():
            writer.add(name, array)
        writer.commit()
    kept.retain(0).tidy()
    assert set(kept.states.rounds()) >= {4, 5}, "S_6 is still to come, and is computed from these"
    assert 3 not in kept.states.rounds()


def test_unfinished_downloads_of_old_rounds_go(kept: Kept) -> None:
    kept.states.remove(3)
    kept.states.receiver(kept.log.states.index(3))
    kept.states.forget_index(1)
    kept.retention.tidy()
    assert not kept.states.partial(3).exists() and not kept.states.path(1).exists()
    assert kept.states.rounds() == [0, 2, 4, 5, 6]


def test_going_forward_only_what_lies_behind_goes(kept: Kept) -> None:
    kept.retain(0).tidy(3)
    assert kept.states.rounds() == [2, 3, 4, 5, 6]
    assert kept.rounds_with_blobs == [2, 3, 4, 5]


def test_the_limit_is_told_once(kept: Kept) -> None:
    kept.retain(0)
    kept.retention.tidy()
    kept.retention.tidy()
    assert len(kept.said) == 1


def test_a_limit_that_cannot_hold_the_least_is_refused_with_the_figure(tmp_path: Path, log: RunLog) -> None:
    needed = bytes_needed(log.manifest)
    per_round = sum(log.blobs.size(digest) or 0 for digest in named_blobs(log.chain, (0,)))
    assert needed == 3 * (log.states.layout.file_bytes - len(log.states.layout.header)) + 2 * per_round
    require_quota(log.manifest, PeerOptions(home=tmp_path, disk_bytes_max=needed))
    require_quota(log.manifest, PeerOptions(home=tmp_path, disk_bytes_max=0, role="bootstrap"))
    with pytest.raises(UserError, match=f"needs {needed} bytes of disk .* give --disk 1 or more"):
        require_quota(log.manifest, PeerOptions(home=tmp_path, disk_bytes_max=needed - 1))


def test_joining_with_such_a_limit_fails_before_anything_is_fetched(tmp_path: Path, log: RunLog) -> None:
    manifest = tmp_path / "run.spes"
    manifest.write_bytes(log.run.manifest.raw)
    options = PeerOptions(
        home=tmp_path / "home", disk_bytes_max=bytes_needed(log.manifest) - 1, listen=("/ip4/127.0.0.1/tcp/0",)
    )  # fmt: skip

    async def whole() -> None:
        async with open_peer(options, manifest, lambda line: None):
            raise AssertionError("it began")

    with pytest.raises(UserError, match="bytes of disk"):
        asyncio.run(whole())
