"""Who gets a group: two claims at the same instant, the standby's turn, and what the organizer orders."""

from __future__ import annotations

import signal
from pathlib import Path

from spes_p2p.store.chain import Step
from spes_p2p.store.events import Line
from spes_protocols.messages import Claim
from tests.e2e.swarm import Swarm, Volunteer, door, make_run, same_ledger, states_fit
from tests.e2e.test_swarm import contributed

PATIENT = {"grace_seconds": 60.0, "lease_rounds": 1000}
"""Nobody loses its place for being slow; nobody is waited for who has gone."""


def rows(step: Step) -> dict[str, tuple[int, ...]]:
    """The groups of each member after a record."""
    return {member.peer: member.groups for member in step.after.members}


def test_one_of_two_claims_wins_and_the_other_stands_by(tmp_path: Path) -> None:
    with Swarm(make_run(tmp_path, groups=2, min_peers=1, per_peer=1, **PATIENT)) as swarm:
        boot = swarm.bootstrap()
        owner = swarm.volunteer("owner", door(boot))
        owner.until_round(1)
        # No round closes while the only owner is paused, so both claims wait for the same commit.
        assert swarm.spes("pause", "--dir", owner.home).process.returncode == 0
        owner.until("paused in a round", lambda s: s.phase == "paused")  # and not after its contribution
        pair = [swarm.volunteer(name, door(boot)) for name in ("one", "other")]
        for volunteer in pair:
            volunteer.wait_line("asked for 1 expert group")
            peer = volunteer.peer_id
            owner.until_event("told of the claim", lambda line, peer=peer: is_claim(line, peer))
        assert swarm.spes("resume", "--dir", owner.home).process.returncode == 0
        for volunteer in pair:
            volunteer.until("a member", lambda s: any(m.me for m in s.members))

        peers = {volunteer.peer_id: volunteer for volunteer in pair}
        step = owner.until_step("decided", lambda s: s.value is not None and bool(s.value.claims))
        assert {claim.signer for claim in step.value.claims} == set(peers)
        winners = [peer for peer in peers if rows(step)[peer]]
        (winner,) = (peers[peer] for peer in winners)
        (standby,) = (volunteer for peer, volunteer in peers.items() if peer not in winners)
        assert rows(step)[standby.peer_id] == ()

        # The standby trains the shared part alone.
        sections = sections_of(standby, after=step.after.round)
        assert sections == ["shared"]

        winner.terminate()
        assert winner.wait_exit() == 0
        (group,) = rows(step)[winner.peer_id]
        left = standby.until_step("the leave", lambda s: s.value is not None and bool(s.value.releases))
        taken = standby.until_step("its successor", lambda s: rows(s).get(standby.peer_id) == (group,))
        assert left.after.round <= taken.after.round <= left.after.round + 2
        assert sections_of(standby, after=taken.after.round) == ["shared", f"group/{group}"]
        assert states_fit(standby) >= 1


def is_claim(line: Line, peer: str) -> bool:
    """Whether an event says that a peer's claim has come and is kept for the next commit."""
    is_it = line.event == "received" and (line.fields.get("kind"), line.fields.get("signer")) == (Claim.KIND, peer)
    return is_it and not line.fields.get("check")


def sections_of(volunteer: Volunteer, *, after: int) -> list[str]:
    """The sections of the first contribution from round `after` on that counts."""
    peer = volunteer.peer_id
    step = volunteer.until_step("a contribution", lambda s: s.before.round >= after and contributed(s, peer))
    (header,) = (h.record for h in step.value.headers if h.signer == peer)
    return [section.name for section in header.sections]


TARGET = 2
"""The round that the organizer goes back to; of the states only the last two are kept."""


def test_the_organizer_starts_resets_bans_and_ends(tmp_path: Path) -> None:
    with Swarm(make_run(tmp_path, groups=2, min_peers=2, per_peer=1, **PATIENT)) as swarm:
        boot = swarm.bootstrap(start_key=False)
        orders = (swarm.run.path, "--key", swarm.run.key_path, "--peer", door(boot))
        assert "0 peers have claimed groups, the manifest wants 2" in swarm.spes("run", "start", *orders).error(2)

        pair = good, bad = [swarm.volunteer(name, door(boot)) for name in ("good", "bad")]
        for volunteer in pair:
            volunteer.wait_line("asked for 1 expert group")
        assert "run started with 2 owners" in swarm.json("run", "start", *orders)["message"]
        good.until_round(TARGET + 3)
        assert "only `spes run reset` may" in swarm.spes("run", "start", *orders).error(2)

        # One of two owners is lost for good, so no round closes; the organizer goes back to a state nobody has kept.
        bad.signal(signal.SIGKILL)
        bad.wait_exit()
        target = next(step.after for step in reversed(good.steps()) if step.after.round == TARGET)
        order = ("--commit", target.id.hex(), "--reason", "an owner is lost")
        reset = swarm.spes("run", "reset", *orders, *order)
        assert f"from round {TARGET} with 1 member" in reset.text
        good.wait_line(rf"the organizer has reset the run \(an owner is lost\): on from round {TARGET}")
        good.wait_line(f"round {TARGET}: 1 of 1 contributions")
        bad = swarm.volunteer("bad", door(boot))
        bad.until("an owner again", lambda s: any(m.me and m.groups for m in s.members))

        banned = swarm.spes("run", "ban", swarm.run.path, bad.peer_id, "--reason", "tests", *orders[1:])
        assert banned.process.returncode == 0, banned.text
        assert "banned" in bad.error(2)
        again = swarm.volunteer("bad", door(boot))
        assert "banned" in again.error(2)
        good.until("alone", lambda s: [m.me for m in s.members] == [True])

        ended = swarm.spes("run", "end", "--reason", "enough", *orders)
        assert ended.process.returncode == 0, ended.text
        assert good.wait_exit() == 0
        assert "the organizer has ended the run: enough" in good.text
        assert good.steps()[-1].after.ended
        late = swarm.volunteer("late", door(boot))
        assert late.wait_exit() == 0
        assert "the organizer has ended the run" in late.text
        same_ledger(good, bad, late)
