"""Blobs that no commit names: what a crash left, what was not counted, and what commits named that were taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.peer import contribution, leftovers
from spes_p2p.peer.contribution import Publisher
from spes_p2p.peer.leftovers import named_blobs
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.retention import Retention
from spes_p2p.store import files
from spes_p2p.store.blobs import BlobStore
from spes_protocols import control_pb2
from spes_protocols import manifest as m
from spes_protocols.codec import sha256
from spes_protocols.errors import UserError
from spes_protocols.messages import SHARED, Header, Signed
from tests.unit.join_support import play_rounds
from tests.unit.log_support import ADA, BOB, EVE, RunLog

ORPHAN = b"what a crash left"
LEFT_ROUNDS = 2


class Keeper:
    """The peer of a log, as far as it keeps and removes; another one is the same peer after a restart."""

    def __init__(self, log: RunLog, *, quota: int = 10**12, role: str = "volunteer") -> None:
        self.log = log
        options = PeerOptions(home=log.folder, disk_bytes_max=quota, role=role, snapshot_rounds=1)
        self.retention = Retention(log.chain, log.states, log.blobs, options, log=lambda line: None)
        self.moved()

    def moved(self) -> None:
        """What the shell does when the head has moved, and the peer after it."""
        self.retention.leftovers.moved()
        self.retention.tidy()

    def close(self) -> None:
        """One more round."""
        close(self.log)
        self.moved()


def close(log: RunLog) -> None:
    log.close_round([log.header(ADA), log.header(BOB)])


def blobs_of(*headers: Signed[Header]) -> set[bytes]:
    return {section.blob for header in headers for section in header.record.sections}


def named(log: RunLog) -> set[bytes]:
    """What the ledger names."""
    return named_blobs(log.chain, range(log.chain.head.round))


def here(log: RunLog, blobs: Iterable[bytes]) -> set[bytes]:
    return {blob for blob in blobs if log.blobs.has(blob)}


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return play_rounds(tmp_path / "log", 2)


def test_what_a_crash_left_goes_with_the_round_that_is_open_then(log: RunLog) -> None:
    own = log.header(ADA)  # its blobs are there; whether it was said does not matter
    orphan = log.blobs.put(ORPHAN)
    download = sha256(b"never came")
    log.blobs.partial(download).write_bytes(b"half")
    keeper = Keeper(log)
    assert here(log, [orphan, *blobs_of(own)]) == {orphan, *blobs_of(own)}
    assert log.blobs.partial(download).exists()
    log.close_round([own, log.header(BOB)])
    keeper.moved()
    assert set(log.blobs.digests()) == named(log) and log.blobs.partials() == []
    assert blobs_of(own) <= named(log)


def test_what_comes_for_a_round_stays_only_if_its_commit_names_it(log: RunLog) -> None:
    log.close_round([log.header(ADA), log.header(BOB)], claims=[log.claim(EVE, wants=0)])
    keeper = Keeper(log)
    counted, refused, late = [log.header(ADA), log.header(BOB)], log.header(EVE), log.section(SHARED).blob
    keeper.retention.leftovers.note([*blobs_of(*counted, refused), late])
    log.close_round(counted, refused=[("norm", refused)])
    assert log.blobs.has(late)
    keeper.moved()
    assert not log.blobs.has(late)
    assert here(log, blobs_of(*counted, refused)) == blobs_of(*counted, refused)


@pytest.mark.parametrize("fails", [False, True], ids=["overtaken", "the disk fails"])
def test_an_own_contribution_that_was_not_said_goes_and_what_it_shares_with_others_stays(
    log: RunLog, tmp_path: Path, fails: bool
) -> None:
    keeper = Keeper(log)
    shared, group = min(named(log)), sha256(ORPHAN)
    contents = {shared: log.blobs.path(shared).read_bytes(), group: ORPHAN}
    done = control_pb2.RoundDone(epoch=log.chain.head.epoch, round=log.chain.head.round)
    for name, blob in (("shared", shared), ("group/0", group)):
        path = tmp_path / blob.hex()
        path.write_bytes(contents[blob])
        done.sections.add(name=name, path=str(path), digest=blob)

    class Slow(BlobStore):
        def put(self, source: Path | bytes) -> bytes:
            digest = super().put(source)
            if digest == group:
                close(log)  # the round is over before the header could be signed
                keeper.moved()
                if fails:
                    raise UserError("disk full")
            return digest

    shell = SimpleNamespace(participant=SimpleNamespace(me=ADA.peer_id), leftovers=keeper.retention.leftovers)
    blobs = Slow(log.blobs.directory)
    publisher = Publisher(cast(Any, None), log.chain, blobs, cast(Any, shell), lambda line: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contribution, "RETRY_SECONDS", 0.001)
        asyncio.run(publisher.on_done(done))
    assert log.blobs.has(shared) and log.blobs.has(group)
    keeper.close()
    assert here(log, [shared, group]) == {shared}


def test_a_download_that_ends_as_its_round_does_goes_a_round_later(log: RunLog) -> None:
    keeper = Keeper(log)
    blob = sha256(ORPHAN)
    keeper.retention.leftovers.note([blob])
    keeper.close()
    log.blobs.put(ORPHAN)
    keeper.close()
    assert not log.blobs.has(blob)


def test_what_the_disk_does_not_remove_is_removed_later(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = log.blobs.put(ORPHAN)
    keeper = Keeper(log)

    class Stuck(files.Disk):
        def unlink(self, path: Path) -> None:
            if path == log.blobs.path(orphan):
                raise OSError(5, "Input/output error")
            super().unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Stuck())
        for _ in range(3):
            keeper.close()
    assert log.blobs.has(orphan)
    keeper.close()
    assert not log.blobs.has(orphan)


def test_a_download_of_an_old_round_goes_and_the_blob_stays(log: RunLog) -> None:
    first, second = sorted(named(log))[:2]
    for blob in (first, second):
        log.blobs.partial(blob).write_bytes(b"half")
    log.blobs.path(second).unlink()
    Keeper(log)
    assert log.blobs.partials() == []
    assert here(log, [first, second]) == {first}


def test_nothing_is_looked_for_while_the_state_is_on_its_way(log: RunLog) -> None:
    blob = next(iter(named(log)))
    log.blobs.partial(blob).write_bytes(b"half")
    log.states.remove(2)
    keeper = Keeper(log)
    assert log.blobs.partials() == [blob]
    keeper.retention.tidy(1)
    assert log.blobs.partials() == [blob]


def test_a_round_reads_no_more_of_the_ledger_than_itself(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        close(log)
    log.blobs.put(ORPHAN)
    keeper = Keeper(log)
    read: list[int] = []
    commit = log.db.commit

    def noting(round_number: int) -> bytes | None:
        read.append(round_number)
        return commit(round_number)

    close(log)
    with monkeypatch.context() as patch:
        patch.setattr(log.db, "commit", noting)
        keeper.retention.leftovers.moved()
        keeper.retention.leftovers.look()
    assert read == [5]


def test_after_many_rounds_at_once_it_looks_again(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "ROUNDS_AT_ONCE", 1)
    keeper = Keeper(log)
    counted, late = [log.header(ADA), log.header(BOB)], log.section(SHARED).blob
    keeper.retention.leftovers.note([*blobs_of(*counted), late])
    log.close_round(counted)
    close(log)
    keeper.moved()
    assert log.blobs.has(late)
    keeper.close()
    assert set(log.blobs.digests()) == named(log)


# ---- commits that were taken back ----------------------------------------------------------------------------------


@pytest.fixture
def parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunLog, set[bytes]]:
    """A log that has gone over to a better branch, with the blobs that only the lost one named, of rounds 1 and 2."""
    monkeypatch.setattr(leftovers, "LEFT_ROUNDS", LEFT_ROUNDS)
    phases = (m.Phase(from_step=0, steps=2, batch_sequences=32),)
    log = RunLog(tmp_path / "log", ownership=m.Ownership(groups=4, min_peers=3), rounds=m.Rounds(phases=phases))
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)], voters=[ADA, BOB, EVE])
    other = log.fork(tmp_path / "other")
    for _ in range(2):
        log.close_with(ADA)
    lost = named(log)
    other.close_with(ADA, BOB)
    log.adopt(other)
    log.states.remove(3)
    for number in range(3):
        with log.states.writer(number) as writer:
            for name, array in other.states.read(number).items():
                writer.add(name, array)
            writer.commit()
    other.close()
    return log, lost - named(log)


def test_blobs_of_a_branch_that_was_left_stay_for_some_rounds(parted: tuple[RunLog, set[bytes]]) -> None:
    log, lost = parted
    keeper = Keeper(log)
    assert log.chain.head.round == 2
    by_round = []
    for _ in range(4):
        by_round.append((log.chain.head.round, len(here(log, lost))))
        keeper.close()
    assert by_round == [(2, 4), (3, 4), (4, 2), (5, 0)]
    assert set(log.blobs.digests()) == named(log)


def test_they_are_found_when_the_ledger_goes_back_too(tmp_path: Path, parted: tuple[RunLog, set[bytes]]) -> None:
    log, _ = parted
    keeper = Keeper(log)
    close(log)
    keeper.moved()
    before = named(log)
    came = log.header(BOB)
    keeper.retention.leftovers.note(blobs_of(came))
    first = next(step for step in log.chain.walk() if step.after.round == 1)
    log.reset(first, first.after.members)
    keeper.moved()
    lost = before - named(log)
    assert len(lost) == 8 and here(log, lost) == lost
    assert here(log, blobs_of(came)) == blobs_of(came)
    while log.chain.head.round <= 2 + LEFT_ROUNDS:
        log.close_round([log.header(peer) for peer in (ADA, BOB, EVE)], voters=[ADA, BOB, EVE])
        keeper.moved()
    assert set(log.blobs.digests()) == named(log)


def test_an_archive_keeps_what_was_taken_back_and_not_what_nobody_named(parted: tuple[RunLog, set[bytes]]) -> None:
    log, lost = parted
    orphan = log.blobs.put(ORPHAN)
    keeper = Keeper(log, role="archive")
    for _ in range(2 * LEFT_ROUNDS + 1):
        keeper.close()
    assert here(log, lost) == lost
    assert not log.blobs.has(orphan)


def test_over_the_quota_they_go_first_and_what_came_for_the_round_stays(parted: tuple[RunLog, set[bytes]]) -> None:
    log, lost = parted
    came = log.section(SHARED).blob
    used = log.blobs.total_bytes() + log.states.total_bytes()
    lost_bytes = sum(log.blobs.size(blob) or 0 for blob in lost)
    Keeper(log, quota=used - 1)
    assert len(here(log, lost)) == len(lost) - 1
    Keeper(log, quota=used - lost_bytes)
    assert here(log, lost) == set()
    assert log.states.rounds() == [0, 1, 2]
    assert log.blobs.has(came)
