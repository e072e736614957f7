"""What must hold of the homes when everything has ended: one ledger, states that fit it, votes that were kept to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spes_p2p.replay.verify import Verifier
from spes_p2p.store.chain import Step
from spes_protocols.errors import SpesError
from tests.chaos.account import Account
from tests.chaos.swarm import Seat
from tests.e2e.swarm import own_votes, same_ledger, states_fit


def check_homes(seats: Sequence[Seat], volunteers: Sequence[Seat], account: Account) -> Iterator[str]:
    """Everything that is wrong; `seats` are all, `volunteers` those among them that hold states and vote."""
    ledgers: dict[str, list[Step]] = {}
    for seat in seats:
        try:
            ledgers[seat.name] = seat.steps()
        except SpesError as error:
            yield f"the ledger of {seat.name}: {error}"
    try:
        same_ledger(*(seat for seat in seats if seat.name in ledgers))
    except AssertionError as error:
        yield f"the ledgers do not agree: {error}"
    longest = max(ledgers.values(), key=len, default=[])
    commits = [step for step in longest if step.commit is not None]
    yield from account.settle_with(
        [(step.before.round, step.after.state_root.hex()[:12]) for step in commits], [step.after.id for step in commits]
    )
    for seat in volunteers:
        try:
            if not states_fit(seat):
                yield f"{seat.name} holds no state that the ledger names"
        except (SpesError, AssertionError) as error:
            yield f"the states of {seat.name}: {error}"
    yield from _broken_votes(volunteers, longest)
    yield from _replayed(volunteers, ledgers)


def _broken_votes(volunteers: Sequence[Seat], ledger: Sequence[Step]) -> Iterator[str]:
    """A vote in the ledger that its signer's own database does not hold: it has signed two in one place."""
    remembered = {seat.peer_id: own_votes(seat) for seat in volunteers}
    for step in ledger:
        for vote in step.votes:
            if vote.raw not in remembered.get(vote.signer, {vote.raw}):
                yield f"{vote.signer} has voted twice: {vote.record} is not among its own votes"


def _replayed(volunteers: Sequence[Seat], ledgers: dict[str, list[Step]]) -> Iterator[str]:
    """The longest part of one log that has all its blobs, recomputed as `spes-replay verify` does."""
    starts = {seat.name: _whole_from(seat, ledgers[seat.name]) for seat in volunteers if seat.name in ledgers}
    found = [(first, seat) for seat in volunteers if (first := starts.get(seat.name)) is not None]
    if not found:
        yield "no log could be replayed: none has a snapshot and all blobs after it"
        return
    first, seat = min(found, key=lambda pair: pair[0])
    verifier = Verifier(seat.run_dir, from_snapshot=first or None)
    for problem in verifier.problems():
        yield f"replay of {seat.name} from round {first}: {problem}"
    if not verifier.tally.state_roots:
        yield f"replay of {seat.name} from round {first}: no round could be recomputed"


def _whole_from(seat: Seat, ledger: Sequence[Step]) -> int | None:
    """The earliest round from which a log holds a state to begin with and all blobs since; None if there is none.

    Who came back by a snapshot lacks the blobs of the rounds it was away.
    """
    run = seat.run_dir
    blobs, gap = run.blobs(), 0
    for step in ledger:
        sections = [s for header in step.value.headers for s in header.record.sections] if step.value else []
        if any(not blobs.has(section.blob) for section in sections):
            gap = step.after.round
    if not gap:
        return 0
    last = ledger[-1].after.round
    return next((number for number in run.states().rounds() if gap <= number < last), None)
