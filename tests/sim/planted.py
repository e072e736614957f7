"""Faults planted into the core or its shell, to see that the checkers see them: `PLANTED`, and a table of the caught.

python -m tests.sim.planted

Each patches one place for as long as seeds are run, and names the words that the violation must have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spes_p2p.core import members
from spes_p2p.core.agreement import Agreement
from spes_p2p.core.head import Head
from spes_p2p.core.ledger import advanced, commit_body
from spes_p2p.core.members import Electorate
from spes_p2p.core.outputs import Committed
from spes_p2p.core.rounds import Output, Participant
from spes_p2p.core.views import Held
from spes_protocols.messages import Commit, Member, VerifiedSet
from tests.sim import checkers
from tests.sim.disk import Disk
from tests.sim.options import Options
from tests.sim.peers import SimPeer
from tests.sim.records import seal
from tests.sim.scenarios import draw_options, failure

SEEDS = 200
"""Within so many seeds each planted fault is caught."""


@contextlib.contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(what stands there)` in a place for a while."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass(frozen=True)
class Planted:
    """A fault: what it is, the words it is caught with, how it gets in, and the schedules that may show it."""

    name: str
    caught_by: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    matters: Callable[[Options], bool] = lambda options: True
    change: Callable[[Options], Options] = lambda options: options
    """What schedules have besides, where those that are drawn show it too rarely."""

    def first_seed(self, seeds: int = SEEDS) -> tuple[int, str] | None:
        """(seed, violation) that catches it, None if none of the first `seeds` seeds does. Raises `TypeError`."""
        with self.plant():
            for seed in range(seeds):
                options = self.change(draw_options(seed))
                problem = failure(options, seed) if self.matters(options) else None
                if problem is not None and problem.startswith("TypeError"):
                    raise TypeError(f"{self.name} does not fit the code any more: {problem}")
                if problem is not None and self.caught_by in problem:
                    return seed, problem
        return None


# ---- the faults --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lease_from_receipt() -> Iterator[None]:
    """A member's lease is renewed when its contribution arrives here, instead of when a commit counts it."""

    def absorb(original: Any) -> Any:
        def absorbed(self: Participant, outputs: Sequence[Any], now: float) -> list[Output]:
            return [_renewed(self, o) if isinstance(o, Committed) else o for o in original(self, outputs, now)]

        return absorbed

    def trusting(verify: Any) -> Any:
        def verified(manifest: Any, head: Head, commit: Commit, value: VerifiedSet, votes: Any) -> Head:
            right = commit_body(manifest, head, value, commit.body.state_root)
            verify(manifest, head, replace(commit, body=right), value, votes)
            return advanced(head, commit.body, value)

        return verified

    with patched(Participant, "_absorb", absorb), patched(checkers, "verify_commit", trusting):
        yield


def _renewed(participant: Participant, output: Committed) -> Committed:
    table = (replace(m, missed=0) if m.peer in participant.headers else m for m in output.body.members)
    return replace(output, body=replace(output.body, members=tuple(table)))


def _lock_dropped() -> contextlib.AbstractContextManager[None]:
    """A new view begins without the lock of the one before."""

    def forgetful(enter: Any) -> Any:
        def entered(self: Agreement, number: int, *rest: Any) -> Any:
            self.locked, self.valid = Held(), Held()
            return enter(self, number, *rest)

        return entered

    return patched(Agreement, "_enter", forgetful)


def _sent_before_stored() -> contextlib.AbstractContextManager[None]:
    """A vote is on the wire before it is on disk."""

    def hasty(say: Any) -> Any:
        def said(self: SimPeer, record: Any, proof: Any) -> Any:
            if self.honest:
                self.broadcast(seal(record, self.name))
            return say(self, record, proof)

        return said

    return patched(SimPeer, "say", hasty)


def _votes_lost_in_restart() -> contextlib.AbstractContextManager[None]:
    """Votes are not on disk at all."""

    def losing(crash: Any) -> Any:
        def crashed(self: Disk, *rest: Any) -> Any:
            torn = crash(self, *rest)
            self.votes.clear()
            return torn

        return crashed

    return patched(Disk, "crash", losing)


def _half_is_enough() -> contextlib.AbstractContextManager[None]:
    """A quorum is more than half of the votes."""
    return patched(Electorate, "is_quorum", lambda _: lambda self, weight: 2 * weight > self.total)


def _one_group_too_many() -> contextlib.AbstractContextManager[None]:
    """A member gets one group more than it wants."""
    return patched(members, "_would_take", lambda _: lambda row, claim, group: len(row.groups) < row.wants + 1)


def _never_forgiven() -> contextlib.AbstractContextManager[None]:
    """`missed` counts all rounds without a contribution, not those in a row."""

    def counting(count: Any) -> Any:
        def counted(member: Member, headers: Any, *rest: Any) -> Member:
            row: Member = count(member, headers, *rest)
            return member if member.peer in headers else row

        return counted

    return patched(members, "_after_round", counting)


def _nothing_repeated() -> contextlib.AbstractContextManager[None]:
    """A lost message is lost for good."""
    return patched(Agreement, "_resend", lambda _: lambda self: [])


def _everything_kept() -> contextlib.AbstractContextManager[None]:
    """Votes for views far ahead are kept, however far."""
    return patched(Agreement, "_in_reach", lambda _: lambda self, view, ahead_max: not self.decided)


PLANTED = (
    Planted("a lease counted from receipt", "commit", _lease_from_receipt, lambda o: "liar" not in o.faulty),
    Planted("a lock dropped on view change", "two commits for", _lock_dropped, lambda o: o.isolate_chance > 0),
    Planted("a vote sent before fsync", "sent two different", _sent_before_stored, lambda o: o.crash_chance > 0),
    Planted("votes lost in a restart", "sent two different", _votes_lost_in_restart, lambda o: o.crash_chance > 0),
    Planted("a quorum of one half", "closed by", _half_is_enough),
    Planted("a group more than wanted", "groups", _one_group_too_many),
    Planted("missed rounds never forgiven", "missed", _never_forgiven, change=lambda o: replace(o, lease_rounds=2)),
    Planted("lost messages never repeated", "no progress", _nothing_repeated, lambda o: o.loss > 0),
    Planted("votes kept however far ahead", "keeps", _everything_kept, lambda o: "liar" in o.faulty),
)


def main() -> int:
    """Print a table; 1 if a planted fault was not caught."""
    missed = 0
    print(f"| planted fault | first of {SEEDS} seeds | caught as |\n|---|---|---|")
    for planted in PLANTED:
        found = planted.first_seed()
        missed += found is None
        seed, problem = ("-", "not caught") if found is None else (str(found[0]), found[1])
        print(f"| {planted.name} | {seed} | {problem} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
