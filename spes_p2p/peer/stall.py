"""A round that does not close, in words: whom it waits for, and what it takes to go on (SPEC 5.12)."""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.core.rounds import Participant

OWNERS_NAMED = 8


def waiting(participant: Participant, waited_seconds: float, now: float) -> str:
    """One line about a round that is under way for so long; empty while that is no longer than it may take.

    `now` is the time that the participant is told, in monotonic seconds.
    """
    rules, head = participant.manifest.rounds, participant.head
    electorate = head.electorate
    if waited_seconds < rules.stall_seconds or not electorate.owners or head.ended:
        return ""
    away = [o for o in electorate.owners if o != participant.me and not participant.patience.is_there(o, now)]
    here = electorate.total - electorate.weight(away)
    if not away:
        late = [owner for owner in electorate.owners if owner not in participant.headers]
        whom = f"contributions of {_names(late)}" if late else "votes"
        return f"waiting for {whom}: owners of all {electorate.total} groups take part"
    if electorate.is_majority(here):
        enough = f"owners of {here} of {electorate.total} groups take part, enough to go on without the others"
        return f"waiting for owners {_names(away)}: {enough}"
    needs = f"needs more than half of {electorate.total} groups, and owners of {here} take part"
    if rules.on_majority_loss == "continue":
        left = max(0.0, rules.lease_seconds - participant.patience.waited_seconds)
        needs += f"; goes on without in {left:.0f} s" if left else "; goes on without as soon as those here agree"
    else:
        needs += "; if they do not come back, the organizer can reset the run"
    return f"waiting for owners {_names(away)}: {needs}"


def _names(peers: Iterable[str]) -> str:
    short = [f"…{peer[-6:]}" for peer in peers]
    return ", ".join(short[:OWNERS_NAMED]) + (f" and {len(short) - OWNERS_NAMED} more" * (len(short) > OWNERS_NAMED))
