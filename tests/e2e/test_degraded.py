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
    Home,
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
from tests.e2e.test_swarm import until_contribution, votes_were_kept_to

QUICK: dict[str, Any] = {
    "steps": 40,
    "grace_seconds": 2.0,
    "blob_seconds": 8.0,
    "propose_seconds": 2.0,
    "vote_seconds": 1.0,
    "stall_seconds": 8.0,
    "lease_seconds": 12.0,
}


def strength(step: Step) -> Strength:
    """How far a commit of a ledger can be relied on."""
    assert step.value is not None
    return commit_strength(step.before, step.value, step.votes)


def degraded(home: Home) -> list[Step]:
    """The commits of a ledger that leave out owners."""
    return [step for step in home.steps() if step.value is not None and step.value.value.dropped]


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
            volunteer.wait_line("closed by owners of 2 of 4 groups .* which may be taken back")
        parted = [degraded(pair[0])[0] for pair in (left, right)]
        assert [strength(step) for step in parted] == [Strength.ANY, Strength.ANY]
        assert parted[0].before.id == parted[1].before.id
        last = max(pair[0].status().round for pair in (left, right))
        for pair in (left, right):
            pair[0].until_round(last + 2)

        network.heal()
        winner = min(parted, key=lambda step: step.after.id)
        losers = right if winner is parted[0] else left
        for volunteer in losers:
            volunteer.wait_line("goes before ours: .* taken back here")
        for volunteer in losers:
            volunteer.until("an owner again", owns(volunteer))
        joined = [until_contribution(volunteer, volunteer.status().round) for volunteer in losers]
        for volunteer in everyone:
            volunteer.until_round(max(joined) + 1)
        assert winner.after.id in {step.after.id for step in same_ledger(*everyone)}
        all_is_well(*everyone)
        kill(*everyone)
        for volunteer in everyone:
            verified(swarm, volunteer, whole=volunteer not in losers)


def verified(swarm: Swarm, home: Volunteer, *, whole: bool) -> None:
    """`spes-replay verify` finds nothing: from the first round, or where states came as snapshots from the last two."""
    start = () if whole else ("--from-snapshot", home.run_dir.states().rounds()[-2])
    checked = swarm.start("verify", "-m", "spes_client.replay", "verify", home.home, *start)
    assert checked.wait_exit() == 0, checked.text


def test_a_run_shrinks_to_one_peer_and_grows_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_majority_loss="continue", **QUICK)
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        one, second, third, fourth = old = [swarm.volunteer(f"v{i}", door(boot)) for i in range(4)]
        for volunteer in old:
            volunteer.until_round(2)

        hangs(second, one)

        # Half of the owners at once, in the middle of a vote: a standby has one of their groups with that commit.
        standby = swarm.volunteer("v4", door(boot))
        standby.until("a member", lambda s: any(m.me for m in s.members))
        until_contribution(standby, standby.status().round)
        assert all(strength(step) == Strength.FINAL for step in one.steps() if step.commit is not None)
        third.until("voting", lambda s: s.phase == "agreeing")
        kill(third, fourth)
        one.wait_line("which may be taken back")
        (step,) = degraded(one)
        assert strength(step) == Strength.ANY
        assert rows(step)[standby.peer_id] and not rows(step)[third.peer_id] and not rows(step)[fourth.peer_id]

        # All but one.
        standby.until_round(step.after.round + 1)
        kill(second, standby)
        one.until("alone", lambda s: [m.me for m in s.members if m.groups] == [True])
        one.until_round(one.status().round + 2)

        others = [swarm.volunteer(f"v{i}", door(boot)) for i in (1, 2, 3)]
        for volunteer in others:
            volunteer.until("an owner again", owns(volunteer))
        for volunteer in others:
            until_contribution(volunteer, volunteer.status().round)
        is_slow(others[0])
        all_is_well(one, *others)
        for program in swarm.programs:
            print("\n----", program.name)
            print("\n".join(program.lines))


def rows(step: Step) -> dict[str, tuple[int, ...]]:
    """The groups of each member after a record."""
    return {member.peer: member.groups for member in step.after.members}


def hangs(volunteer: Volunteer, witness: Volunteer) -> None:
    """A trainer that hangs is killed; its peer has lost the group by then, and begins anew with it."""
    before, (group,) = volunteer.status(), rows(volunteer.steps()[-1])[volunteer.peer_id]
    os.kill(before.trainer_pid, signal.SIGSTOP)
    witness.until("rid of it", lambda s: all(m.peer != volunteer.peer_id for m in s.members))
    volunteer.wait_line("trainer: no sign of life for .* killed; starting it again")
    wait_gone(before.trainer_pid)
    volunteer.until("an owner again", owns(volunteer))
    again = next(s for s in reversed(volunteer.steps()) if group not in rows(s).get(volunteer.peer_id, ()))
    until_contribution(volunteer, again.after.round)
    steps = moments(volunteer)
    assert max(n for name, n in steps.items() if "experts" in name) < min(
        n for name, n in steps.items() if "experts" not in name
    )


def is_slow(volunteer: Volunteer) -> None:
    """Who has less of a processor does fewer steps, is cut when the others are done, and counts by its tokens."""
    trainer = volunteer.status().trainer_pid
    os.sched_setaffinity(trainer, {0})
    since = volunteer.status().round
    rivals = [subprocess.Popen(launch([sys.executable, "-c", "while True: pass"])) for _ in range(6)]
    try:
        for rival in rivals:
            os.sched_setaffinity(rival.pid, {0})
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
    rules = QUICK | {"on_majority_loss": "pause"}
    with Swarm(make_run(tmp_path, groups=3, min_peers=3, **rules)) as swarm:
        boot = swarm.bootstrap(start_key=False)
        orders = (swarm.run.path, "--key", swarm.run.key_path, "--peer", door(boot))
        one, other, third = [swarm.volunteer(f"v{i}", door(boot)) for i in range(3)]
        for volunteer in (one, other, third):
            volunteer.wait_line("asked for 1 expert group")
        assert "run started with 3 owners" in swarm.json("run", "start", *orders)["message"]
        for volunteer in (one, other, third):
            volunteer.until_round(4)

        # Two of three are gone: the third waits, says for whom, and goes on when they are back.
        kill(other, third)
        one.wait_line("waiting for owners ….*: needs more than half of 3 groups, and owners of 1 of 3 groups are here")
        stalled = swarm.spes("status", "--dir", one.home)
        assert "needs more than half of 3" in stalled.text
        for name in (other.peer_id, third.peer_id):
            assert name[-6:] in swarm.json("status", "--dir", one.home)["waiting"]
        last = one.status().round
        other, third = [swarm.volunteer(f"v{i}", door(boot)) for i in (1, 2)]
        for volunteer in (one, other, third):
            volunteer.until_round(last + 1)
        assert swarm.json("status", "--dir", one.home)["waiting"] == ""
        assert not degraded(one)

        # One stays away during two resets, another during the second; each keeps commits that are taken back.
        kill(third)
        first = next(step.after for step in reversed(one.steps()) if step.after.round == last - 1)
        reset = swarm.spes("run", "reset", *orders, "--commit", first.id.hex(), "--reason", "one is away")
        assert f"reset 1: the run goes on from round {first.round} with 2 members, 2 owners" in reset.text
        for volunteer in (one, other):
            volunteer.wait_line(r"has reset the run \(one is away\)")
            volunteer.until_round(first.round + 2)
        kill(other)
        one.until("waiting", lambda s: bool(s.waiting))
        second = next(step.after for step in reversed(one.steps()) if step.after.round == first.round + 1)
        reset = swarm.spes("run", "reset", *orders, "--commit", second.id.hex())
        assert f"reset 2: the run goes on from round {second.round} with 1 member, 1 owner" in reset.text
        one.until_round(second.round + 3)
        other, third = [swarm.volunteer(f"v{i}", door(boot)) for i in (1, 2)]
        for volunteer in (other, third):
            volunteer.until("an owner again", owns(volunteer))
            until_contribution(volunteer, volunteer.status().round)
        for volunteer in (one, other, third):
            resets = [step.opening.record for step in volunteer.steps() if step.kind == "reset"]
            assert [reset.number for reset in resets] == [1, 2]
        all_is_well(one, other, third)
        owners_gone(swarm, orders, door(boot), one, other, third)
        for program in swarm.programs:
            print("\n----", program.name)
            print("\n".join(program.lines))


def owners_gone(swarm: Swarm, orders: tuple[object, ...], address: str, *owners: Volunteer) -> None:
    """Nobody who owns anything comes back: a standby is given everything, then a newcomer, after everybody is gone."""
    standby = swarm.volunteer("v3", address)
    standby.until("a member", lambda s: any(m.me for m in s.members))
    until_contribution(standby, standby.status().round)
    kill(*owners)
    standby.wait_line("waiting for owners .*needs more than half of 3 groups, and owners of 0 of 3 groups are here")
    assert "only `spes run reset` may" in swarm.spes("run", "start", *orders).error(2)
    reset = swarm.spes("run", "reset", *orders, "--reason", "gone")
    assert "with 1 member, 1 owner" in reset.text
    standby.until_round(standby.status().round + 2)

    kill(standby)
    assert "none of the 1 member" in swarm.spes("run", "reset", *orders).error(2)
    newcomer = swarm.volunteer("v4", address)
    newcomer.wait_line("asked for 1 expert group")
    assert "with 1 member, 1 owner" in swarm.spes("run", "reset", *orders).text
    newcomer.until_round(newcomer.status().round + 1)

    assert swarm.spes("run", "end", *orders).process.returncode == 0
    assert newcomer.wait_exit() == 0
    reset = swarm.spes("run", "reset", *orders)
    assert "with 0 members, 0 owners" in reset.text
    last = swarm.volunteer("v5", address)
    last.wait_line("asked for 1 expert group")
    more = [swarm.volunteer(f"v{i}", address) for i in (6, 7)]
    for volunteer in more:
        volunteer.wait_line("asked for 1 expert group")
    assert "run started with 3 owners" in swarm.spes("run", "start", *orders).text
    last.until_round(last.status().round + 1)
    all_is_well(last, *more)
