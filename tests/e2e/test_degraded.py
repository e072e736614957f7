"""What a run does when most of it is gone, or cut in two: it goes on or waits, as its manifest says, and heals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.core.ledger import commit_strength
from spes_p2p.core.members import Strength
from spes_p2p.net.launch import launch
from spes_p2p.store.chain import Step
from spes_protocols.messages import Header
from tests.e2e import sides
from tests.e2e.swarm import (
    Program,
    Swarm,
    Volunteer,
    door,
    expecting_no_orphans,
    make_run,
    same_ledger,
    states_fit,
    wait_gone,
)
from tests.e2e.test_restart import moments
from tests.e2e.test_swarm import contributed, until_contribution, votes_were_kept_to

QUICK: dict[str, Any] = {
    "steps": 40,
    "grace_seconds": 2.0,
    "blob_seconds": 8.0,
    "propose_seconds": 2.0,
    "vote_seconds": 1.0,
    "stall_seconds": 8.0,
    "lease_seconds": 12.0,
    "lease_rounds": 3,
}


def strength(step: Step) -> Strength:
    """How far a commit of a ledger can be relied on."""
    assert step.value is not None
    return commit_strength(step.before, step.value, step.votes)


def is_degraded(step: Step) -> bool:
    """Whether a record is a commit that leaves out owners."""
    return step.value is not None and bool(step.value.value.dropped)


def kill(*volunteers: Volunteer) -> None:
    with expecting_no_orphans(*volunteers):
        for volunteer in volunteers:
            volunteer.signal(signal.SIGKILL)
        for volunteer in volunteers:
            volunteer.wait_exit()


def owns(volunteer: Volunteer) -> Callable[[Any], bool]:
    return lambda status: any(m.peer == volunteer.peer_id and m.groups for m in status.members)


def all_is_well(*volunteers: Volunteer) -> None:
    """One ledger, votes that were kept to, states of that ledger; nothing that nobody has thought of."""
    same_ledger(*volunteers)
    votes_were_kept_to(*volunteers)
    for volunteer in volunteers:
        assert states_fit(volunteer) >= 1
        assert "internal error" not in volunteer.text
        assert "Traceback" not in volunteer.text


@pytest.mark.skipif(bool(sides.obstacle()), reason=sides.obstacle())
def test_two_sides_go_on_and_come_together(tmp_path: Path) -> None:
    with sides.Sides() as network, Swarm(make_run(tmp_path, on_majority_loss="continue", **QUICK)) as swarm:
        here, there = network.both
        boot = swarm.bootstrap(side=here)
        left = [swarm.volunteer(f"v{i}", door(boot), side=here) for i in (0, 1)]
        right = [swarm.volunteer(f"v{i}", door(boot), side=there) for i in (2, 3)]
        everyone = [*left, *right]
        for volunteer in everyone:
            volunteer.until_round(2)

        network.cut()
        for volunteer in everyone:
            step = volunteer.until_step("closed by owners of half of the groups", is_degraded)
            assert strength(step) == Strength.ANY
            volunteer.until_round(step.after.round + 1)
        assert any("closed by owners of 2 of 4 groups" in volunteer.text for volunteer in everyone)

        network.heal()
        parted = fork(left[0], right[0])
        winner = min(parted, key=lambda step: (-strength(step), step.after.id))
        losers = right if winner is parted[0] else left
        for volunteer in losers:
            volunteer.wait_line("goes before ours: .* taken back here")
        joined = [until_owner(volunteer, winner.after.round) for volunteer in losers]
        for volunteer in everyone:
            volunteer.until_round(max(joined) + 1)
        assert winner.after.id in {step.after.id for step in same_ledger(*everyone)}
        all_is_well(*everyone)
        kill(*everyone)
        checks = [verifying(swarm, volunteer, whole=volunteer not in losers) for volunteer in (left[0], right[0])]
        for check in checks:
            assert check.wait_exit() == 0, check.text


def fork(one: Volunteer, other: Volunteer) -> tuple[Step, Step]:
    """The first records that differ. The line may have been cut when one side had the votes for a commit of all."""
    return next(pair for pair in zip(one.steps(), other.steps(), strict=False) if pair[0].after.id != pair[1].after.id)


def until_owner(volunteer: Volunteer, after: int) -> int:
    """Wait for a commit of round `after` or later that counts what this volunteer has trained as an owner."""
    peer = volunteer.peer_id
    step = volunteer.until_step(
        "an owner again",
        lambda s: s.before.round >= after and contributed(s, peer) and bool(rows_before(s).get(peer)),
    )
    return step.before.round


def verifying(swarm: Swarm, home: Volunteer, *, whole: bool) -> Program:
    """`spes-replay verify`: from the first round, or where states came as snapshots from the last two."""
    start = () if whole else ("--from-snapshot", home.run_dir.states().rounds()[-2])
    checked: Program = swarm.start("verify", "-m", "spes_client.replay", "verify", home.home, *start)
    return checked


def test_a_run_shrinks_to_one_peer_and_grows_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_majority_loss="continue", **QUICK)
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        one, second, third, fourth = old = [swarm.volunteer(f"v{i}", door(boot)) for i in range(4)]
        for volunteer in old:
            volunteer.until_round(2)

        hangs(swarm, second, one)

        # Half of the owners at once, in the middle of a vote: a standby has one of their groups.
        standby = swarm.volunteer("v4", door(boot))
        standby.until("a member", lambda s: any(m.me for m in s.members))
        until_contribution(standby, standby.status().round)
        assert all(strength(step) == Strength.FINAL for step in one.steps() if step.commit is not None)
        third.until("voting", lambda s: s.phase in ("collecting", "agreeing"))
        kill(third, fourth)
        step = one.until_step("closed by a few", is_degraded)
        assert strength(step) == Strength.ANY
        assert not rows(step).get(third.peer_id) and not rows(step).get(fourth.peer_id)
        # With that commit, or if it had sent nothing yet by then with the next one.
        taken = one.until_step(
            "counting the standby", lambda s: s.after.round >= step.after.round and contributed(s, standby.peer_id)
        )
        assert rows(taken)[standby.peer_id]

        # All but one.
        standby.until_round(taken.after.round)
        kill(second, standby)
        one.until("alone", lambda s: [m.me for m in s.members if m.groups] == [True])
        since = one.until_round(one.status().round + 1).round

        others = [swarm.volunteer(f"v{i}", door(boot)) for i in (1, 2, 3)]
        for volunteer in others:
            until_owner(volunteer, since)
        is_slow(others[0])
        all_is_well(one, *others)


def rows(step: Step) -> dict[str, tuple[int, ...]]:
    """The groups of each member after a record."""
    return {member.peer: member.groups for member in step.after.members}


def rows_before(step: Step) -> dict[str, tuple[int, ...]]:
    """The groups of each member in the round that a record closes."""
    return {member.peer: member.groups for member in step.before.members}


def hangs(swarm: Swarm, volunteer: Volunteer, witness: Volunteer) -> None:
    """A trainer that hangs is killed; its peer has lost the group by then, and begins anew with it."""
    before, (group,) = volunteer.status(), rows(volunteer.steps()[-1])[volunteer.peer_id]
    os.kill(before.trainer_pid, signal.SIGSTOP)
    volunteer.wait_line("trainer: no sign of life for .* killed; starting it again")
    wait_gone(before.trainer_pid)
    if owns(volunteer)(witness.status()):  # rounds take long here: it would not have lost the group
        assert swarm.spes("pause", "--dir", volunteer.home).process.returncode == 0
        witness.until_step("without it", lambda s: s.after.round > before.round and lacks(s, volunteer, group))
        assert swarm.spes("resume", "--dir", volunteer.home).process.returncode == 0
    volunteer.until("an owner again", owns(volunteer))
    again = next(s for s in reversed(volunteer.steps()) if lacks(s, volunteer, group))
    assert again.after.round > before.round
    until_contribution(volunteer, again.after.round)
    steps = moments(volunteer)
    assert max(n for name, n in steps.items() if "experts" in name) < min(
        n for name, n in steps.items() if "experts" not in name
    )


def lacks(step: Step, volunteer: Volunteer, group: int) -> bool:
    """Whether a volunteer does not own a group after a record."""
    return group not in rows(step).get(volunteer.peer_id, ())


def is_slow(volunteer: Volunteer) -> None:
    """Who has less of a processor does fewer steps, is cut when the others are done, and counts by its tokens."""
    trainer, processor = volunteer.status().trainer_pid, {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(trainer, processor)
    since = volunteer.status().round
    rivals = [subprocess.Popen(launch([sys.executable, "-c", "while True: pass"])) for _ in range(6)]
    try:
        for rival in rivals:
            os.sched_setaffinity(rival.pid, processor)
        while not (cut := [h for h in headers(volunteer, since) if h.steps < QUICK["steps"]]):
            volunteer.until_round(volunteer.status().round + 1)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert all(header.tokens == header.steps * 2 * 32 for header in cut)


def headers(volunteer: Volunteer, since: int) -> list[Header]:
    """What a volunteer contributed from a round on, as the ledger has it."""
    steps = [step for step in volunteer.steps() if step.value is not None and step.before.round >= since]
    return [h.record for step in steps for h in step.value.headers if h.signer == volunteer.peer_id]


def test_a_run_waits_and_the_organizer_goes_on(tmp_path: Path) -> None:
    rules = QUICK | {"on_majority_loss": "pause", "lease_rounds": 1000}  # nobody loses a place for being slow
    with Swarm(make_run(tmp_path, groups=2, min_peers=2, **rules)) as swarm:
        boot = swarm.bootstrap(start_key=False)
        orders = (swarm.run.path, "--key", swarm.run.key_path, "--peer", door(boot))
        one, other = [swarm.volunteer(f"v{i}", door(boot)) for i in range(2)]
        for volunteer in (one, other):
            volunteer.wait_line("asked for 1 expert group")
        assert "run started with 2 owners" in swarm.json("run", "start", *orders)["message"]
        third = swarm.volunteer("v2", door(boot))
        since = third.until("a member", lambda s: any(m.me for m in s.members)).round
        third.until_round(since + 3)

        # Half of the groups are gone: the run waits, says for whom, and goes on when they are back.
        kill(other)
        waits = f"waiting for owners …{other.peer_id[-6:]}: needs more than half of 2 groups, and owners of 1 "
        one.wait_line(waits, after=len(one.lines))
        assert "needs more than half of 2 groups" in " ".join(swarm.spes("status", "--dir", one.home).text.split())
        assert other.peer_id[-6:] in swarm.json("status", "--dir", one.home)["waiting"]
        last = one.status().round
        other = swarm.volunteer("v1", door(boot))
        for volunteer in (one, other):
            volunteer.until_round(last + 1)
        one.until("waiting no more", lambda s: not s.waiting)
        assert not any(map(is_degraded, one.steps()))

        # One is away during two resets, another during the second; both have commits that are taken back.
        kill(other)
        first = next(step.after for step in reversed(one.steps()) if step.after.round == since + 1)
        reset = swarm.spes("run", "reset", *orders, "--commit", first.id.hex(), "--reason", "one is away")
        assert f"reset 1: the run goes on from round {first.round} with 2 members, 2 owners" in reset.text
        for volunteer in (one, third):
            volunteer.wait_line(r"has reset the run \(one is away\)")
            volunteer.until_round(first.round + 2)
        kill(third)
        one.until("waiting", lambda s: bool(s.waiting))
        second = next(step.after for step in reversed(one.steps()) if step.after.round == first.round + 1)
        reset = swarm.spes("run", "reset", *orders, "--commit", second.id.hex())
        assert f"reset 2: the run goes on from round {second.round} with 1 member, 1 owner" in reset.text
        one.until_round(second.round + 3)
        other, third = [swarm.volunteer(f"v{i}", door(boot)) for i in (1, 2)]
        for volunteer in (other, third):
            volunteer.until("a member", lambda s: any(m.me for m in s.members))
            until_contribution(volunteer, volunteer.status().round)
        for volunteer in (one, other, third):
            resets = [step.opening.record for step in volunteer.steps() if step.kind == "reset"]
            assert [reset.number for reset in resets] == [1, 2]
        all_is_well(one, other, third)
        owners_gone(swarm, orders, door(boot), one, other, third)


def owners_gone(swarm: Swarm, orders: tuple[object, ...], address: str, *members: Volunteer) -> None:
    """Nobody who owns anything comes back: the standby is given a group, then a newcomer, after all are gone."""
    owners = [volunteer for volunteer in members if rows(members[0].steps()[-1])[volunteer.peer_id]]
    (standby,) = (volunteer for volunteer in members if volunteer not in owners)
    kill(*owners)
    waits = "waiting for owners .*needs more than half of 2 groups, and owners of 0 take part"
    standby.wait_line(waits, after=len(standby.lines))
    assert "only `spes run reset` may" in swarm.spes("run", "start", *orders).error(2)
    reset = swarm.spes("run", "reset", *orders, "--reason", "gone")
    assert "with 1 member, 1 owner" in reset.text
    standby.wait_line("has reset the run")
    standby.until_round(standby.status().round + 1)

    # Only the bootstrap is left, and nobody who comes has the last state; the organizer goes back to one that is there.
    kill(standby)
    assert "none of the 1 member" in swarm.spes("run", "reset", *orders).error(2)
    # Its newest state may be of a commit that was not made any more.
    known, states = {step.after.id for step in standby.steps()}, owners[0].run_dir.states().rounds()
    commit = next(s.after for s in reversed(owners[0].steps()) if s.after.round in states and s.after.id in known)
    held = commit.round
    back = swarm.volunteer(owners[0].home.name, address)
    back.wait_line("could not be fetched: .*; trying again .states here: .*" + str(held))
    reset = swarm.spes("run", "reset", *orders, "--commit", commit.id.hex())
    assert "with 1 member, 1 owner" in reset.text
    assert "no peer here" not in reset.text
    back.until_round(held + 1)

    assert swarm.spes("run", "end", *orders).process.returncode == 0
    assert back.wait_exit() == 0
    reset = swarm.spes("run", "reset", *orders)
    assert "with 0 members, 0 owners" in reset.text
    pair = [swarm.volunteer(name, address) for name in (back.home.name, "v3")]
    for volunteer in pair:
        volunteer.wait_line("asked for 1 expert group")
    assert "run started with 2 owners" in swarm.spes("run", "start", *orders).text
    for volunteer in pair:
        volunteer.until_round(volunteer.status().round + 1)
    all_is_well(*pair)
