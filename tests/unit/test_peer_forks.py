"""Ledgers that part: which branch is in force, and how a peer finds out and goes over to it (SPEC 5.13)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import commit_body, start_record
from spes_p2p.crypto.envelope import seal, verify_set
from spes_p2p.crypto.keys import Identity
from spes_p2p.peer.ledger_sync import Answer, LedgerReader, Read
from spes_p2p.peer.service import Service
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.chain import Branch, Chain, Step
from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols import manifest as m
from spes_protocols.codec import decode, digest, encode
from spes_protocols.errors import IntegrityError, RemoteError
from spes_protocols.messages import Claim, Commit, Precommit, ProposedSet, Reset
from spes_protocols.requests import CHAIN, KNOWN_MAX, ChainEntry, ChainReply, ChainRequest
from tests.sim.records import make_header, make_manifest, next_root
from tests.unit.hostile_support import MemoryTransport

PEERS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)), key=lambda i: i.peer_id)
ORGANIZER, START_KEY = Identity.from_seed(b"o" * 32), Identity.from_seed(b"s" * 32)
MANIFEST = replace(
    make_manifest(groups=5),
    organizer=m.Organizer(keys=(ORGANIZER.peer_id,), start_keys=(START_KEY.peer_id,)),
)
RUN_ID = digest(MANIFEST)


class Line:
    """One peer's ledger, written without blobs and states: neither is looked at here."""

    def __init__(self, path: Path) -> None:
        self.db = LedgerDB(path)
        self.chain = Chain(MANIFEST, RUN_ID, self.db)

    @property
    def head(self) -> Head:
        return self.chain.head

    def append(self, kind: str, data: bytes) -> Step:
        step = self.chain.check(kind, data)
        self.chain.append(step)
        return step

    def take(self, other: Line) -> None:
        """Copy another ledger that goes on from this one."""
        for kind, data in other.db.chain(self.chain.length, 1000):
            self.append(kind, data)

    def start(self, key: Identity = ORGANIZER, owners: Sequence[Identity] = PEERS) -> Step:
        head = self.head
        place = {"run_id": RUN_ID, "round": head.round, "commit": head.id, "state_root": head.state_root}
        claims = [seal(Claim(**place, wants=1), peer) for peer in owners]
        return self.append("start", seal(start_record(MANIFEST, head, claims), key).raw)

    def close(
        self, voters: Sequence[int] = range(5), *, drop: Sequence[int] = (), degraded: bool = False, variant: int = 0
    ) -> Step:
        """A commit by the owners of these places, which may drop others."""
        head = self.head
        owners = [next(i for i in PEERS if i.peer_id == peer) for peer in head.electorate.owners]
        headers = [seal(make_header(MANIFEST, head, o.peer_id, variant=variant).record, o) for o in owners]
        value = verify_set(
            ProposedSet(
                run_id=RUN_ID,
                epoch=head.epoch,
                round=head.round,
                parent=head.id,
                headers=tuple(h.raw for h in sorted(headers, key=lambda h: h.signer)),
                dropped=tuple(sorted(g for place in drop for g in head.members[place].groups)),
            )
        )
        root = next_root(head.state_root, value.id)
        vote = Precommit(
            run_id=RUN_ID,
            epoch=head.epoch,
            round=head.round,
            view=0,
            value=value.id,
            state_root=root,
            degraded=degraded or bool(drop),
        )
        votes = [seal(vote, owners[place]) for place in voters]
        body = commit_body(MANIFEST, head, value, root)
        precommits = tuple(v.raw for v in sorted(votes, key=lambda v: v.signer))
        return self.append("commit", encode(Commit(body=body, view=0, precommits=precommits)))

    def reset(self, to: Head, number: int) -> Step:
        return self.append("reset", seal(a_reset(to, number), ORGANIZER).raw)


def a_reset(to: Head, number: int) -> Reset:
    """Back to a head with the table it had."""
    return Reset(
        run_id=RUN_ID, number=number, parent=to.id, round=to.round, state_root=to.state_root, members=to.members
    )


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[tuple[Line, Line]]:
    """Two peers whose ledgers are the same so far: a start and two final commits."""
    one, two = Line(tmp_path / "one.sqlite"), Line(tmp_path / "two.sqlite")
    one.start()
    one.close()
    one.close()
    two.take(one)
    yield one, two
    one.db.close()
    two.db.close()


def network(one: Line, two: Line) -> tuple[MemoryTransport, str]:
    """The transport of `one`, and the peer id under which it reaches `two`."""
    members: dict[str, MemoryTransport] = {}
    mine, other = MemoryTransport(members, PEERS[0]), MemoryTransport(members, PEERS[1])

    async def nothing(sender: str, raw: bytes) -> bytes:
        return b""

    Service(
        cast(Any, other), b"", two.chain, cast(Any, None), BlobStore(two.db.path.parent / "blobs"),
        on_hello=nothing, on_push=nothing, claims=list,
    )  # fmt: skip
    return mine, other.peer_id


def reader(one: Line, two: Line, *, consents: bool = True) -> tuple[LedgerReader, str]:
    async def judge(peer: str, step: Step) -> None:
        if not consents:
            raise RemoteError("votes", f"round {step.before.round} was closed by few")

    mine, peer = network(one, two)
    return LedgerReader(cast(Any, mine), one.chain, lambda what, share: None, judge), peer


def read(one: Line, two: Line, *, consents: bool = True) -> Read:
    """`one` reads the ledger of `two`."""
    ledger, peer = reader(one, two, consents=consents)
    return asyncio.run(ledger.read(peer))


def compare(one: Line, two: Line) -> Answer:
    ledger, peer = reader(one, two)
    return asyncio.run(ledger.compare(peer))


# ---- which branch ------------------------------------------------------------------------------------------------


def test_a_longer_ledger_is_read_on(lines: tuple[Line, Line]) -> None:
    one, two = lines
    assert (compare(one, two), read(one, two)) == (Answer.SAME, Read(0, 0))
    for _ in range(3):
        two.close()
    assert compare(one, two) == Answer.LONGER
    assert read(one, two) == Read(3, 0)
    assert one.head == two.head


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"voters": (0, 1, 2), "drop": (3, 4)}),
        ({"voters": (0, 1, 2), "drop": (3, 4)}, {"voters": (3, 4), "drop": (0, 1, 2)}),
        ({"voters": (0, 1, 2), "degraded": True, "variant": 1}, {"voters": (3, 4), "drop": (0, 1, 2)}),
        ({"voters": (3, 4), "drop": (0, 1, 2)}, {"voters": (0,), "drop": (1, 2, 3, 4)}),
    ],
    ids=["final over majority", "majority over few", "majority over few, nobody dropped", "more over fewer"],
)
def test_the_first_record_decides_however_long_the_branches_are(
    lines: tuple[Line, Line], better: dict[str, Any], worse: dict[str, Any]
) -> None:
    one, two = lines
    parted = one.head
    one.close(**better)
    two.close(**worse)
    for _ in range(5):
        two.close(range(len(two.head.electorate.owners)))
    assert (compare(one, two), read(one, two)) == (Answer.WORSE, Read(0, 0))
    assert compare(two, one) == Answer.BETTER
    assert read(two, one) == Read(1, 6)
    assert one.head == two.head
    assert two.head.recent[-2][1] == parted.id
    assert [kind for kind, _ in two.db.abandoned()] == ["commit"] * 6
    assert Chain(MANIFEST, RUN_ID, two.db).head == one.head, "and so it reads after a restart"


def test_of_equal_branches_the_lower_id_wins(lines: tuple[Line, Line]) -> None:
    one, two = lines
    first = one.close((0, 1), drop=(2, 3, 4)).after.id
    second = two.close((2, 3), drop=(0, 1, 4)).after.id
    low, high = (one, two) if first < second else (two, one)
    assert (compare(low, high), compare(high, low)) == (Answer.WORSE, Answer.BETTER)


def test_branches_that_part_long_ago_find_where(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close()
    two.close((0, 1, 2), drop=(3, 4))
    for _ in range(100):
        one.close()
        two.close((0, 1, 2))
    assert read(two, one) == Read(101, 101)
    assert one.head == two.head
    assert len(one.chain.known()) <= KNOWN_MAX


def test_a_ledger_names_its_heads_ever_more_sparsely(lines: tuple[Line, Line]) -> None:
    one, _ = lines
    for _ in range(60):
        one.close()
    positions = [one.chain.position_of(id) for id in one.chain.known()]
    assert positions == [63, 62, 61, 60, 59, 58, 57, 56, 55, 47, 31, 0]
    assert one.chain.common([b"x" * 32, one.chain.known()[3]]) == 60
    assert one.chain.common([b"x" * 32]) == 0


def test_a_commit_of_a_few_is_left_however_long_ago_it_was(
    lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.store.chain.HEADS_MAX", 8)
    one, two = lines
    one.close((4,), drop=(0, 1, 2, 3))
    for _ in range(30):
        one.close((0,))
    for _ in range(3):
        two.close()
    assert read(one, two) == Read(3, 31)
    assert one.head == two.head
    again = Chain(MANIFEST, RUN_ID, one.db)
    assert again.branch(0) is not None, "another start may have been made"
    assert again.branch(1) is not None, "recent"


def test_what_is_final_is_not_moved_by_another_final_commit(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close()
    two.close(variant=1)
    two.close()
    for mine, other in ((one, two), (two, one)):
        before = mine.head
        assert (compare(mine, other), read(mine, other), mine.head) == (Answer.WORSE, Read(0, 0), before)
    two.reset(two.head, 1)
    assert read(one, two) == Read(3, 1)


# ---- consent -----------------------------------------------------------------------------------------------------


def test_a_commit_of_a_few_is_followed_only_with_consent(lines: tuple[Line, Line]) -> None:
    one, two = lines
    two.close((4,), drop=(0, 1, 2, 3))
    two.close((0,))
    with pytest.raises(RemoteError, match="round 2 was closed by few"):
        read(one, two, consents=False)
    assert one.chain.length == 3
    assert read(one, two, consents=True) == Read(2, 0)


def test_consent_is_asked_for_wherever_such_a_commit_stands(lines: tuple[Line, Line]) -> None:
    one, two = lines
    two.close()
    two.close((4,), drop=(0, 1, 2, 3))
    assert read(one, two, consents=False) == Read(1, 0)
    assert read(one, two, consents=True) == Read(1, 0)


def test_a_better_branch_is_taken_as_far_as_the_next_commit_of_a_few(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close((4,), drop=(0, 1, 2, 3))
    two.close()
    two.close()
    two.close((0,), drop=(1, 2, 3, 4))
    two.close((0,))
    assert read(one, two, consents=False) == Read(2, 1)
    assert read(one, two, consents=True) == Read(2, 0)


def test_before_a_reset_that_makes_a_branch_better_nothing_is_asked(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close()
    two.close((0,), drop=(1, 2, 3, 4))
    goal = two.close((0,)).after
    two.reset(replace(goal, members=one.head.members), 1)
    two.close((0,), drop=(1, 2, 3, 4))
    assert read(one, two, consents=False) == Read(3, 1)
    assert one.head.resets == 1


def test_a_commit_of_a_majority_is_followed_by_anybody(lines: tuple[Line, Line]) -> None:
    one, two = lines
    two.close((0, 1, 2), drop=(3, 4))
    assert read(one, two, consents=False) == Read(1, 0)


# ---- openings ----------------------------------------------------------------------------------------------------


def test_a_reset_takes_back_what_followed_and_goes_before_all_commits(lines: tuple[Line, Line]) -> None:
    one, two = lines
    goal = one.head
    for _ in range(3):
        one.close()
        two.close(variant=1) if two.head.id != one.head.id else None
    two.reset(goal, 1)
    two.close(variant=2)
    assert read(one, two) == Read(2, 3)
    assert (one.head, one.head.resets) == (two.head, 1)
    assert (compare(two, one), read(two, one)) == (Answer.SAME, Read(0, 0))


def test_the_reset_with_the_higher_number_is_in_force(lines: tuple[Line, Line]) -> None:
    one, two = lines
    goal = one.head
    one.close()
    first = seal(a_reset(goal, 1), ORGANIZER).raw
    one.append("reset", first)
    one.close()
    two.append("reset", seal(a_reset(goal, 2), ORGANIZER).raw)
    assert read(one, two) == Read(1, 2)
    assert one.head == two.head
    with pytest.raises(RemoteError, match="goes before this record"):
        one.append("reset", first)


def test_a_reset_further_on_counts_more_than_where_the_branches_part(lines: tuple[Line, Line]) -> None:
    one, two = lines
    one.close()
    two.close((0, 1, 2), drop=(3, 4))
    for _ in range(4):
        two.close((0, 1, 2))
    assert compare(one, two) == Answer.WORSE
    two.reset(two.head, 1)
    assert compare(one, two) == Answer.BETTER
    assert read(one, two) == Read(6, 1)
    assert one.head == two.head


def test_a_reset_is_found_behind_many_records(lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.peer.service.CHAIN_ENTRIES_MAX", 4)
    one, two = lines
    one.close()
    two.close((0, 1, 2), drop=(3, 4))
    for _ in range(10):
        two.close((0, 1, 2))
    two.reset(two.head, 1)
    two.close((0, 1, 2))
    assert read(one, two) == Read(13, 1)
    assert one.head == two.head
    assert (one.chain.reset_from(0), one.chain.reset_from(15)) == (two.db.chain(14, 1)[0][1], b"")
    assert Chain(MANIFEST, RUN_ID, one.db).reset_from(14) == one.chain.reset_from(14)


@pytest.mark.parametrize("shown", ["not the organizer's", "of another run", "no later than ours", "nothing"])
def test_only_the_organizers_reset_has_a_worse_branch_read_on(lines: tuple[Line, Line], shown: str) -> None:
    one, two = lines
    goal = one.head
    one.close()
    one.reset(goal, 1)
    two.close((0, 1, 2), drop=(3, 4))
    for _ in range(10):
        two.close((0, 1, 2))
    record, key = a_reset(two.head, 2), ORGANIZER
    if shown == "not the organizer's":
        key = START_KEY
    if shown == "of another run":
        record = replace(record, run_id=bytes(32))
    if shown == "no later than ours":
        record = replace(record, number=1)
    raw = b"" if shown == "nothing" else seal(record, key).raw
    assert endless(one, two, raw) == (Answer.WORSE, 1)


def test_reading_on_ends_at_the_round_of_the_reset(lines: tuple[Line, Line]) -> None:
    one, two = lines
    shown = seal(a_reset(two.close((0, 1, 2), drop=(3, 4)).after, 1), ORGANIZER).raw
    one.close()
    for _ in range(40):
        two.close((0, 1, 2))
    assert endless(one, two, shown) == (Answer.WORSE, 1)
    with pytest.raises(RemoteError):
        endless(one, two, b"no envelope")


def endless(one: Line, two: Line, reset: bytes) -> tuple[Answer, int]:
    """How a ledger that shows this reset compares, given four records at a time, and how often it was asked."""
    mine, other = (MemoryTransport(members, peer) for members in [{}] for peer in PEERS[:2])

    async def answer(sender: str, request: bytes) -> bytes:
        first = two.chain.common(decode(ChainRequest, request).known)
        entries = tuple(ChainEntry(kind=kind, data=data) for kind, data in two.db.chain(first, 4))
        return encode(ChainReply(first=first, reset=reset, entries=entries, length=10**9))

    other.handle(CHAIN, answer)
    ledger = LedgerReader(cast(Any, mine), one.chain, lambda what, share: None)
    return asyncio.run(ledger.compare(other.peer_id)), len(mine.calls)


def test_of_two_starts_the_organizers_own_stands(tmp_path: Path) -> None:
    one, two = Line(tmp_path / "one.sqlite"), Line(tmp_path / "two.sqlite")
    one.start(START_KEY)
    two.start(ORGANIZER, PEERS[:4])
    assert (compare(one, two), compare(two, one)) == (Answer.BETTER, Answer.WORSE)
    assert read(one, two) == Read(1, 1)
    assert one.head == two.head


def test_a_run_that_trains_is_not_moved_by_another_start(tmp_path: Path) -> None:
    one, two = Line(tmp_path / "one.sqlite"), Line(tmp_path / "two.sqlite")
    one.start(START_KEY)
    one.close()
    two.start(ORGANIZER, PEERS[:4])
    assert read(one, two) == Read(0, 0)
    with pytest.raises(RemoteError, match="goes before this record"):
        one.append(*two.db.chain(0, 1)[0])


# ---- the store ---------------------------------------------------------------------------------------------------


def test_a_branch_is_checked_record_by_record(lines: tuple[Line, Line]) -> None:
    one, two = lines
    two.close()
    last = two.close()
    branch = one.chain.branch(one.chain.length)
    assert isinstance(branch, Branch)
    with pytest.raises(RemoteError, match="does not follow"):
        branch.add("commit", last.data)
    assert branch.steps == []


def test_a_disk_that_does_not_take_a_branch_changes_nothing(
    lines: tuple[Line, Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = lines
    one.close((0, 1, 2), drop=(3, 4))
    two.close()
    before = one.head

    def full(position: int, rows: object) -> None:
        raise IntegrityError("ledger", "here", "no room")

    monkeypatch.setattr(one.db, "replace_from", full)
    with pytest.raises(IntegrityError):
        read(one, two)
    assert (one.head, one.chain.length) == (before, 4)
    assert Chain(MANIFEST, RUN_ID, one.db).head == before
