"""A run from its start through everything that happens to volunteers: joining, leaving, dying, pausing."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from spes_p2p.store.chain import Step
from tests.e2e.swarm import (
    Swarm,
    Volunteer,
    command_of,
    descendants,
    door,
    expecting_no_orphans,
    make_run,
    own_votes,
    same_ledger,
    states_fit,
    wait_gone,
)

GRACE_SECONDS = 5.0
"""A volunteer that is merely slow is waited for; so long a round takes in which a trainer is paused."""

LEASE_ROUNDS = 4
"""One that misses a few rounds on a busy machine keeps its place."""


def contributed(step: Step, peer: str) -> bool:
    """Whether a commit counts a peer's contribution."""
    return step.value is not None and peer in {header.signer for header in step.value.headers}


def until_contribution(volunteer: Volunteer, after: int) -> int:
    """Wait for a commit of round `after` or later that counts this volunteer; returns its round."""
    peer = volunteer.peer_id
    step = volunteer.until_step("a contribution", lambda s: s.before.round >= after and contributed(s, peer))
    return step.before.round


def groups_of(step: Step, peer: str) -> tuple[int, ...]:
    member = step.after.member(peer)
    return () if member is None else member.groups


def test_a_swarm_outlives_its_bootstrap_and_its_volunteers(tmp_path: Path) -> None:
    with Swarm(make_run(tmp_path, grace_seconds=GRACE_SECONDS, lease_rounds=LEASE_ROUNDS)) as swarm:
        boot = swarm.bootstrap()
        first, paused, killed, steady = old = [swarm.volunteer(f"v{i}", door(boot)) for i in range(4)]
        for volunteer in old:
            volunteer.until_round(2)

        with expecting_no_orphans(boot):
            boot.signal(signal.SIGKILL)
            boot.wait_exit()
        since = steady.status().round
        steady.until_round(max(3, since + 1))

        fifth = swarm.volunteer("v4", paused.address, options=("--gpus", 2))  # two processes that share a model
        fifth.until("a member", lambda status: any(m.me for m in status.members))
        joined = until_contribution(fifth, fifth.status().round)
        assert joined >= 3

        # A clean leave: the newcomer, the only standby, has the group as soon as it misses no round.
        (group,) = groups_of(steady.steps()[-1], first.peer_id)
        with expecting_no_orphans(first):
            first.signal(signal.SIGTERM)
            assert first.wait_exit() == 0
        assert first.lines[-1] == "left the run"
        left = steady.until_step("the leave", lambda s: s.value is not None and bool(s.value.releases))
        taken = steady.until_step(
            "a contribution of the standby",
            lambda s: s.after.round >= left.after.round and contributed(s, fifth.peer_id),
        )
        assert group in groups_of(taken, fifth.peer_id)
        until_contribution(fifth, taken.after.round)

        pauses(swarm, paused)
        dies(killed, steady)
        loses_its_helpers(steady)

        swarm.spes("leave", "--dir", fifth.home)
        assert fifth.wait_exit() == 0
        assert fifth.lines[-1] == "left the run"
        for volunteer in (paused, steady):
            volunteer.until("without it", lambda s: all(m.peer != fifth.peer_id for m in s.members))

        everyone = (first, paused, killed, steady, fifth)
        same_ledger(*everyone)
        tells_what_happened(swarm, *old)
        votes_were_kept_to(*everyone)
        for volunteer in everyone:
            assert states_fit(volunteer) >= 1
            assert "internal error" not in volunteer.text
            assert "Traceback" not in volunteer.text


def tells_what_happened(swarm: Swarm, *old: Volunteer) -> None:
    """The volunteers' event logs have every contribution of an early round made once, and heard everywhere else."""
    peers = {volunteer.peer_id for volunteer in old}
    full = [step.before.round for step in old[-1].steps() if all(contributed(step, peer) for peer in peers)]
    homes = [volunteer.home for volunteer in old]
    for number in full:
        timeline = swarm.json("events", *homes, "--round", number)
        assert (timeline["round"], timeline["skipped"], timeline["unknown"], timeline["lost"]) == (number, 0, 0, 0)
        if is_told_whole(timeline, peers):
            break
    else:
        raise AssertionError(f"none of the rounds {full} is told whole")
    answer = swarm.spes("events", *homes, "--round", number, "--why", f"header:{old[0].peer_id}")
    assert f"made its header of round {number}" in answer.text
    reached = answer.text.partition("It reached ")[2]
    assert all(f"…{peer[-6:]} after " in reached for peer in peers - {old[0].peer_id})


def is_told_whole(timeline: dict[str, Any], peers: set[str]) -> bool:
    """Whether everybody heard every header itself: on a busy machine one may come when its round is over."""
    assert {clock["peer"] for clock in timeline["clocks"]} == peers
    made = {event["id"]: event for event in timeline["events"] if event["event"] == "header"}
    assert {event["peer"] for event in made.values()} == peers
    assert len(made) == len(peers)
    heard = {
        (event["id"], event["peer"]): event["seconds"]
        for event in timeline["events"]
        if event["event"] == "received" and event["id"] in made and not event.get("check")
    }
    assert all(made[name]["seconds"] < seconds for (name, _), seconds in heard.items())
    heads = [event for event in timeline["events"] if event["event"] == "head"]
    assert {event["peer"] for event in heads if event["round"] == timeline["round"] + 1} == peers
    lines = Counter(event["peer"] for event in timeline["events"])
    assert max(lines.values()) < 200, lines
    return set(heard) == {(name, peer) for name, event in made.items() for peer in peers - {event["peer"]}}


def pauses(swarm: Swarm, volunteer: Volunteer) -> None:
    """`spes pause` frees the trainer's memory, the peer goes on voting, `spes resume` brings it back."""
    before = swarm.json("status", "--dir", volunteer.home)
    assert before["trainer"] == "running"
    assert before["peer_id"] == volunteer.peer_id
    assert [m["me"] for m in before["members"] if m["peer"] == volunteer.peer_id] == [True]
    trainer = before["trainer_pid"]
    os.kill(trainer, 0)

    assert "memory is free" in swarm.spes("pause", "--dir", volunteer.home).text
    wait_gone(trainer, 1.0)
    status = volunteer.status()
    assert (status.trainer, status.trainer_pid) == ("paused", 0)
    # Its contribution to the round in which it was paused may have been sent already, and others may close a round
    # before it has voted: it has LEASE_ROUNDS tries.
    volunteer.until_step(
        "voting without training",
        lambda s: s.before.round >= before["round"] and misses(s, volunteer) and own_votes_in(volunteer, s) != [],
    )

    assert swarm.spes("resume", "--dir", volunteer.home).process.returncode == 0
    volunteer.until("training again", lambda s: s.trainer == "running" and s.trainer_pid not in (0, trainer))
    until_contribution(volunteer, volunteer.status().round)


def misses(step: Step, owner: Volunteer) -> bool:
    """Whether an owner's contribution is missing from a commit."""
    member = step.before.member(owner.peer_id)
    return member is not None and bool(member.groups) and not contributed(step, owner.peer_id)


def dies(victim: Volunteer, witness: Volunteer) -> None:
    """A killed volunteer leaves no process behind, loses its groups after lease_rounds, and training goes on."""
    with expecting_no_orphans(victim):
        victim.signal(signal.SIGKILL)
        victim.wait_exit()
    last = witness.until("rid of it", lambda s: all(m.peer != victim.peer_id for m in s.members)).round
    steps = {step.before.round: step for step in witness.steps() if step.commit is not None}
    rows = [step.after.member(victim.peer_id) for _, step in sorted(steps.items())]
    assert [row.missed for row in rows if row is not None][-1] == LEASE_ROUNDS - 1
    witness.until_round(last + 2)


def loses_its_helpers(volunteer: Volunteer) -> None:
    """Trainer, worker and network daemon are started again when they die, and their peer contributes again."""
    trainer = volunteer.status().trainer_pid
    helpers = descendants(volunteer.pid)
    assert sorted(helpers) == sorted({trainer, *(pid for pid in helpers if re.search("worker|p2pd", command_of(pid)))})
    assert len(helpers) == 3
    seen = len(volunteer.lines)
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    volunteer.wait_line("trainer: killed by signal 9; starting it again", after=seen)
    again = volunteer.until("training again", lambda s: s.trainer == "running" and s.trainer_pid not in (0, trainer))
    until_contribution(volunteer, again.round)


def own_votes_in(volunteer: Volunteer, step: Step) -> list[bytes]:
    """What a volunteer has signed in the round that a commit closed."""
    with volunteer.run_dir.ledger() as db:
        return db.own_votes(step.before.epoch, step.before.round)


def votes_were_kept_to(*volunteers: Volunteer) -> None:
    """Every precommit of a volunteer that stands in anybody's ledger is one that its own database remembers."""
    votes = [vote for volunteer in volunteers for step in volunteer.steps() for vote in step.votes]
    remembered = {volunteer.peer_id: own_votes(volunteer) for volunteer in volunteers}
    mine = [vote for vote in votes if vote.signer in remembered]
    assert len(mine) > len(volunteers)
    assert [vote.record for vote in mine if vote.raw not in remembered[vote.signer]] == []
