"""The simulator in CI: schedules from seeds, their reduction, and named situations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from spes_p2p.core import members
from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.core.members import Electorate
from spes_p2p.core.outputs import Abstain, Halt, RootsDiffer
from spes_protocols.messages import Header, Member, Prevote, Proposal, Reset, Signed, Start
from tests.sim import soak
from tests.sim.disk import Entry
from tests.sim.faulty import AmnesiacPeer, BrokenPeer, SlipPeer
from tests.sim.options import FAULTS, Options, active, only
from tests.sim.peers import SimPeer
from tests.sim.planted import patched
from tests.sim.records import ORGANIZER, START_KEY, make_claim, make_set, peer_name, seal
from tests.sim.scenarios import (
    FAULTY_KINDS,
    build_world,
    draw_options,
    explain,
    failure,
    join,
    require_progress,
    run_seed,
)
from tests.sim.shrink import shrink
from tests.sim.world import Blobs, World

CHUNK = 16
SEEDS = 240


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_schedules(first: int) -> None:
    problems = [problem for seed in range(first, first + CHUNK) if (problem := explain(seed))]
    assert not problems, "\n" + "\n".join(problems)


def test_a_seed_is_a_schedule() -> None:
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        run_seed(seed, lines.append)
        return lines

    assert trace(5) == trace(5)
    assert trace(5) != trace(6)


def test_schedules_differ_in_what_goes_wrong() -> None:
    drawn = [draw_options(seed) for seed in range(SEEDS)]
    assert {options.owners for options in drawn} >= {1, 2, 3, 4, 10}
    assert {kind for options in drawn for kind in options.faulty} == set(FAULTY_KINDS) - {""}
    for name, off in FAULTS.items():
        found = {any(getattr(options, key) != value for key, value in off.items()) for options in drawn}
        assert found == {True, False}, name


def test_soak_reports_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seeds", "2", "--first", "7"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("soak: 2 schedules, 0 violations, ") and last.endswith(" per second")
    assert soak.main(["--seed", "7", "--trace"]) == 0
    assert "publishes its contribution to round 0" in capsys.readouterr().out


def test_soak_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state.json"
    arguments = ["--first", "3", "--jobs", "1", "--state", str(state)]
    assert soak.main([*arguments, "--seeds", "2"]) == 0
    assert json.loads(state.read_text())["next"] == 5
    assert soak.main([*arguments, "--seeds", "3"]) == 0
    assert soak.main([*arguments, "--seeds", "3"]) == 0
    ends = [line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("soak:")]
    assert ends == [f"soak: {count} schedules, 0 violations" for count in (2, 3, 3)]


def test_every_fault_can_be_left_out() -> None:
    drawn = [draw_options(seed) for seed in range(SEEDS)]
    assert set(FAULTS) <= {name for options in drawn for name in active(options)}
    for options in drawn:
        assert only(options, active(options)) == options
        bare = only(options, ())
        assert not active(bare) and (bare.owners, bare.groups) == (options.owners, options.groups)
    with pytest.raises(ValueError, match="no such fault"):
        only(drawn[0], ("rain",))


def test_a_failing_schedule_is_reduced_to_what_it_needs() -> None:
    options = draw_options(2)
    with patched(Electorate, "is_quorum", lambda _: lambda self, weight: 2 * weight > self.total):
        found = shrink(options, 2)
    assert found is not None
    smallest, seed, problem = found
    assert "was closed by" in problem and len(active(smallest)) < len(active(options))
    with patched(Electorate, "is_quorum", lambda _: lambda self, weight: 2 * weight > self.total):
        assert failure(smallest, seed) == problem
    assert shrink(smallest, seed) is None


# ---- situations --------------------------------------------------------------------------------------------------


def swarm(options: Options, seed: int = 1) -> World:
    """A swarm in which nothing goes wrong by chance."""
    world = build_world(options, seed)
    world.faults_on = False
    world.run(0.0)
    return world


def reach(world: World, round_number: int) -> None:
    """Run until everybody who is there has that round before it."""

    def is_there() -> bool:
        return all(peer.head.round >= round_number for peer in world.peers.values() if peer.up)

    assert world.run(300.0, is_there), {peer.label: peer.head.round for peer in world.peers.values()}


def owner(world: World, group: int) -> SimPeer:
    """Who owns a group by the newest head."""
    return world.peers[next(m.peer for m in world.newest_head().members if group in m.groups)]


def owners(head: Head) -> dict[int, str]:
    """Owner of each group."""
    return {group: member.peer for member in head.members for group in member.groups}


def commits(peer: SimPeer) -> list[Entry]:
    """The rounds of a peer's ledger."""
    return [entry for entry in peer.disk.chain if entry.kind == "commit"]


def test_a_run_without_faults_commits_in_view_0() -> None:
    world = swarm(Options())
    reach(world, 6)
    peer = world.honest()[0]
    assert {entry.commit.view for entry in commits(peer) if entry.commit} == {0}
    assert len({p.head.state_root for p in world.peers.values() if p.head.round == peer.head.round}) == 1
    assert world.newest_head().cursor == world.newest_head().round * 4 * 10  # four members, five steps of two sequences
    assert world.newest_head().step == world.newest_head().round * 5


@pytest.mark.parametrize("vacant", [1, 2])
def test_two_claims_for_one_group_at_the_same_instant(vacant: int) -> None:
    world = swarm(Options(groups=6, min_peers=6, owners=6 - vacant))
    reach(world, 1)
    free = sorted(set(range(6)) - set(owners(world.newest_head())))
    rivals = [join(world, name, groups=(free[0],)) for name in ("a", "b")]
    assert world.run(60.0, lambda: all(world.newest_head().member(rival.name) for rival in rivals))
    reach(world, world.newest_head().round + 2)
    won = [peer for peer in rivals if owners(world.newest_head()).get(free[0]) == peer.name]
    assert len(won) == 1
    other = next(peer for peer in rivals if peer is not won[0])
    row = world.newest_head().member(other.name)
    assert row is not None
    assert row.groups == ((free[1],) if vacant == 2 else ())


def test_a_killed_owner_loses_its_group_after_its_lease_and_training_goes_on() -> None:
    world = swarm(Options(lease_rounds=3))
    reach(world, 2)
    killed = owner(world, 2)
    killed.kill()
    first_missed = killed.head.round
    reach(world, first_missed + 3)
    tables = {entry.after.round: entry.after for entry in commits(world.honest()[0])}
    assert owners(tables[first_missed + 2])[2] == killed.name
    assert 2 not in owners(tables[first_missed + 3])
    assert tables[first_missed + 3].member(killed.name) is None
    reach(world, first_missed + 6)


def test_a_released_group_is_taken_by_a_standby_within_two_rounds() -> None:
    world = swarm(Options(standbys=1))
    reach(world, 3)
    standby = next(p for p in world.peers.values() if p.label == "s4")
    assert world.newest_head().member(standby.name) == Member(peer=standby.name, wants=1, admitted=0)
    leaver = owner(world, 1)
    said_at = world.newest_head().round
    leaver.leave()
    assert world.run(60.0, lambda: owners(world.newest_head()).get(1) == standby.name)
    assert world.newest_head().round <= said_at + 2
    assert world.newest_head().member(leaver.name) is None
    assert world.run(60.0, lambda: leaver.gone)


def test_a_fifth_peer_joins_at_round_5_by_catching_up() -> None:
    world = swarm(Options(groups=5, min_peers=4))
    reach(world, 5)
    newcomer = join(world, "fifth")
    assert world.run(60.0, lambda: newcomer.head.member(newcomer.name) is not None)
    reach(world, newcomer.head.round + 2)
    assert [e.after.id for e in newcomer.disk.chain][:5] == [e.after.id for e in world.honest()[0].disk.chain][:5]
    row = newcomer.head.member(newcomer.name)
    assert row is not None and len(row.groups) == 1
    assert newcomer.name in {h.signer for entry in commits(newcomer) if entry.value for h in entry.value.headers}


def test_a_standby_gets_the_highest_group_of_an_owner_of_several() -> None:
    world = swarm(Options(groups=6, min_peers=3, owners=3, wants=2))
    reach(world, 1)
    before = world.newest_head()
    standby = join(world, "late")
    assert world.run(60.0, lambda: standby.name in owners(world.newest_head()).values())
    after = world.newest_head()
    giver = max(before.members, key=lambda m: m.groups)
    assert owners(after) == owners(before) | {giver.groups[1]: standby.name}
    table = {entry.after.round: entry.after for entry in commits(world.honest()[0])}[after.round - 1]
    assert table.member(standby.name) == Member(peer=standby.name, wants=1, admitted=table.round)


class BadPeer(SimPeer):
    """Sends values that are not finite."""

    honest = False

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        header, _ = super().make_contribution()
        return header, Blobs(Verdict("finite"), self.name)


class LoudPeer(SimPeer):
    """Sends deltas far above the others'."""

    honest = False

    def make_contribution(self) -> tuple[Signed[Header], Blobs]:
        header, blobs = super().make_contribution()
        return header, Blobs(Verdict(None, tuple((name, 1e6) for name, _ in blobs.verdict.norms)), self.name)


def swarm_with(kinds: Sequence[type[SimPeer]], options: Options) -> World:
    """A swarm with one owner of each of these kinds."""
    world = World(options, 1)
    world.faults_on = False
    peers = [kind(world, peer_name(number), f"p{number}") for number, kind in enumerate(kinds)]
    for peer in peers:
        world.after(0.0, peer.boot)
    world.organizer.start_run([make_claim(world.genesis, peer.name) for peer in peers])
    world.run(0.0)
    return world


@pytest.mark.parametrize(("kind", "check"), [(BadPeer, "finite"), (LoudPeer, "norm")])
def test_refused_contributions_are_recorded_and_cost_the_groups(kind: type[SimPeer], check: str) -> None:
    world = swarm_with([SimPeer, SimPeer, SimPeer, kind], Options(offences_max=2))
    reach(world, 1)
    entries = commits(world.honest()[0])
    offender = peer_name(3)
    assert [(c, h.signer) for e in entries[:1] if e.value for c, h in e.value.refused] == [(check, offender)]
    row = entries[0].after.member(offender)
    assert row is not None and (row.offences, row.missed, len(row.groups)) == (1, 1, 1)
    reach(world, 2)
    second = commits(world.honest()[0])[1]
    assert second.after.member(offender) is None
    assert len(owners(second.after)) == 3


def test_the_next_view_commits_when_the_leader_is_dead() -> None:
    world = swarm(Options())
    reach(world, 1)
    head = world.newest_head()
    leader = world.peers[head.electorate.leader(0)]
    leader.kill()
    reach(world, head.round + 1)
    entry = next(e for e in commits(world.honest()[0]) if e.before.round == head.round)
    assert entry.commit is not None and entry.commit.view == 1


def test_a_peer_with_another_root_computes_it_again_then_abstains() -> None:
    world = swarm_with([SimPeer, SimPeer, SimPeer, BrokenPeer], Options())
    reach(world, 1)
    broken, absent = world.peers[peer_name(3)], world.peers[peer_name(0)]
    broken.notes.clear()
    round_number = world.newest_head().round
    absent.up = False  # so that the broken peer's vote is missed
    absent.life += 1
    assert world.run(120.0, lambda: len(broken.notes) == 2)
    assert [type(note) for note in broken.notes] == [RootsDiffer, Abstain]
    assert world.newest_head().round <= round_number + 1
    absent.boot()
    reach(world, round_number + 3)


def test_a_peer_that_slipped_once_votes_with_the_others_after_computing_again() -> None:
    world = swarm_with([SimPeer, SimPeer, SlipPeer, SimPeer], Options())
    reach(world, 1)
    slip, absent = world.peers[peer_name(2)], world.peers[peer_name(0)]
    absent.kill()
    round_number = world.newest_head().round
    slip.notes.clear()
    reach(world, round_number + 3)
    assert {type(note) for note in slip.notes} == {RootsDiffer}
    late = [e for e in commits(world.honest()[0]) if e.before.round > round_number]
    assert late and all(slip.name in {vote.signer for vote in e.votes} for e in late)


def halted_swarm() -> World:
    """Four owners, two of whom compute roots of their own."""
    world = swarm_with([SimPeer, SimPeer, BrokenPeer, BrokenPeer], Options())

    def all_halted() -> bool:
        return all(any(isinstance(note, Halt) for note in peer.notes) for peer in world.peers.values())

    assert world.run(120.0, all_halted)
    return world


def test_the_round_halts_when_no_root_can_win_until_a_reset_goes_on() -> None:
    world = halted_swarm()
    head = world.newest_head()
    assert head.round == 0 and {p.participant.phase for p in world.peers.values()} == {"halted"}
    sound = [peer for peer in world.peers.values() if peer.honest]
    for peer in world.peers.values():
        if not peer.honest:
            peer.kill()
    rows = [Member(peer=p.name, groups=(i,), wants=1) for i, p in enumerate(sound)]
    reset = Reset(
        run_id=head.run_id,
        parent=head.id,
        round=0,
        state_root=head.state_root,
        members=members.in_order(rows),
        number=1,
    )
    world.organizer.announce("opening", seal(reset, ORGANIZER))
    assert world.run(60.0, lambda: world.newest_head().round >= 2)
    assert len(world.newest_head().electorate.owners) == 2


def test_a_peer_without_its_votes_abstains_when_shown_one() -> None:
    world = swarm_with([SimPeer, SimPeer, SimPeer, AmnesiacPeer], Options())
    reach(world, 2)
    forgetful = world.peers[peer_name(3)]
    head = forgetful.head
    other = next(peer for peer in world.honest() if peer.head.id == head.id)
    forgetful.go_down()
    assert forgetful.head.round == 0
    assert world.run(60.0, lambda: forgetful.ready and forgetful.participant.head.round >= head.round)
    now = forgetful.participant.head
    vote = Prevote(run_id=now.run_id, epoch=now.epoch, round=now.round, view=0, value=b"\1" * 32)
    forgetful.on_network(other.name, "record", seal(vote, forgetful.name))
    assert isinstance(forgetful.notes[-1], Abstain)
    assert forgetful.participant.agreement.abstains
    reach(world, now.round + 2)
    assert not forgetful.participant.agreement.abstains


def test_a_banned_peer_is_out_and_its_claims_are_refused() -> None:
    world = swarm(Options())
    reach(world, 1)
    banned = owner(world, 0)
    world.organizer.ban(banned.name)
    assert world.run(60.0, lambda: world.newest_head().member(banned.name) is None)
    reach(world, world.newest_head().round + 3)
    assert world.newest_head().member(banned.name) is None and world.newest_head().banned == (banned.name,)
    other = next(peer for peer in world.honest() if peer is not banned)
    assert ("claim", banned.name) in {(refusal.check, refusal.peer) for refusal in other.refusals}


def test_a_ban_and_an_end_at_once_both_happen() -> None:
    world = swarm(Options())
    reach(world, 1)
    banned = owner(world, 0)
    world.organizer.end()
    world.organizer.ban(banned.name)
    assert world.run(60.0, lambda: all(peer.head.ended for peer in world.honest()))
    assert world.newest_head().banned == (banned.name,)
    ended_at = world.newest_head().round
    world.run(60.0)
    assert world.newest_head().round == ended_at


def test_an_emptied_run_waits_and_is_started_again() -> None:
    world = swarm(Options(owners=2, groups=2, min_peers=2))
    reach(world, 1)
    leavers = list(world.peers.values())
    watcher = join(world, "watcher", wants=0)
    assert world.run(60.0, lambda: watcher.head.member(watcher.name) is not None)
    for peer in leavers:
        peer.leave()
    assert world.run(60.0, lambda: not watcher.head.electorate.owners)
    head = watcher.head
    assert watcher.participant.phase == "waiting"
    empty = make_set(head).value
    watcher.on_network(peer_name(7), "record", seal(Proposal(view=0, valid_view=-1, value=empty), peer_name(7)))
    newcomer = join(world, "second", wants=1)
    assert world.run(60.0, lambda: newcomer.head.id == head.id)
    table = members.opening_members(world.manifest, [make_claim(head, newcomer.name)], head.id, head.round)
    start = Start(
        run_id=head.run_id,
        parent=head.id,
        round=head.round,
        state_root=head.state_root,
        members=table,
        cursor=head.cursor,
        step=head.step,
    )
    world.organizer.announce("opening", seal(start, START_KEY))
    assert world.run(60.0, lambda: watcher.head.round >= head.round + 2)


def test_a_reset_to_the_start_goes_on_from_the_state_that_anybody_can_make() -> None:
    world = swarm(Options())
    reach(world, 3)
    assert not any(number == 0 for peer in world.peers.values() for number, _ in peer.disk.states)
    world.organizer.reset_to(owner(world, 0).disk.chain[0].after)
    assert world.run(60.0, lambda: all(peer.head.resets == 1 and peer.head.round > 1 for peer in world.peers.values()))


def test_a_reset_to_a_state_that_nobody_has_any_more_is_followed_by_one_to_the_start() -> None:
    world = swarm(Options())
    reach(world, 4)
    old = next(entry.after for entry in commits(owner(world, 0)) if entry.after.round == 1)
    assert not any(peer.offers(old) for peer in world.peers.values())
    world.organizer.reset_to(old)
    assert world.run(60.0, lambda: all(peer.head.resets == 2 and peer.head.round > 1 for peer in world.peers.values()))


def test_nothing_is_demanded_of_who_has_followed_a_ledger_to_a_state_that_is_gone_for_good() -> None:
    world = swarm(Options(stall_seconds=15.0, lease_seconds=30.0))
    reach(world, 1)
    away = owner(world, 0)
    away.sleep(50.0, stands_still=True)
    others = [peer for peer in world.peers.values() if peer is not away]
    assert world.run(45.0, lambda: min(peer.head.round for peer in others) >= 4)
    away.wake()
    assert world.run(60.0, lambda: away.head.round > 2 and not away.disk.has_state)
    assert not away.waits_for_what_is_lost()
    assert world.patience_seconds(away.head) == 0.0
    for peer in others:
        peer.kill()
    assert away.waits_for_what_is_lost()
    assert world.patience_seconds(away.head) is None
    require_progress(world, heads=2)
    assert not away.disk.has_state


@pytest.mark.parametrize("seed", [804589, 806022])
def test_schedules_that_failed(seed: int) -> None:
    """All had let go of a state before the reset to it came; all but one left for good while it changed branch."""
    assert explain(seed) is None


def test_progress_is_demanded() -> None:
    world = swarm(Options())
    reach(world, 1)
    require_progress(world, heads=3)
    assert min(peer.head.round for peer in world.honest()) >= 4
