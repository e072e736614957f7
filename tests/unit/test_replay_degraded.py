"""Logs of hard times: commits by few, double voters, branches that lost; and what is forged in one is found."""

import itertools
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_client.replay import main
from spes_p2p.crypto.envelope import seal, unseal, unseal_votes, verify_set
from spes_p2p.replay.degraded import Degraded, notes
from spes_p2p.replay.log import Log, open_ledger
from spes_p2p.replay.show import rows
from spes_p2p.replay.taken_back import taken_back
from spes_p2p.replay.verify import Verifier
from spes_p2p.store.chain import Step
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode, encode
from spes_protocols.errors import IntegrityError
from spes_protocols.manifest import Ownership
from spes_protocols.messages import Commit, Evidence, Precommit, Prevote, VerifiedSet
from tests.unit.log_support import (
    ADA,
    BOB,
    EVE,
    RunLog,
    by_signer,
    copy_log,
    flip_inside,
    make_manifest,
    play_degraded,
    records,
    rewrite,
    rewrite_record,
)

LEDGER = "ledger.sqlite"
PEOPLE = {peer.peer_id: peer for peer in (ADA, BOB, EVE)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = play_degraded(tmp_path_factory.mktemp("degraded"))
    log.close()
    return log


@pytest.fixture
def run(played: RunLog, tmp_path: Path) -> RunDir:
    """A copy of the played log, to be damaged."""
    return copy_log(played, tmp_path)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[RunLog]:
    """A log after a round of ADA, BOB and EVE with a group each, to be gone on with."""
    log = RunLog(tmp_path / "opened", ownership=Ownership(groups=4, min_peers=3))
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)], voters=[ADA, BOB, EVE])
    yield log
    log.close()


def first(run: RunDir) -> tuple[int | None, str, str]:
    """Round, file and check of the first problem of a log."""
    with closing(Verifier(run).problems()) as problems:
        problem = next(problems)
    return problem.round, problem.file.relative_to(run.path).as_posix(), problem.check


def sound(run: RunDir) -> bool:
    return list(Verifier(run).problems()) == []


def commit_at(run: RunDir, position: int) -> Commit:
    return decode(Commit, records(run)[position][1])


def voted_again(commit: Commit, value: VerifiedSet, *, degraded: bool) -> Commit:
    """The commit as it would be if its voters had voted for `value`."""
    votes = [
        seal(replace(vote.record, value=value.id, degraded=degraded), PEOPLE[vote.signer])
        for vote in unseal_votes(commit.precommits, Precommit)
    ]
    return replace(commit, body=replace(commit.body, value=value.value), precommits=by_signer(votes))


# ---- what verify and show say -----------------------------------------------------------------------------------


def test_a_degraded_log_verifies_and_is_marked(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["contributions"], found["state_roots"], found["snapshots"]) == (5, 10, 5, 6)
    assert [d["round"] for d in found["degraded"]] == [1, 3]
    assert [(d["strength"], len(d["dropped"])) for d in found["degraded"]] == [("majority", 1), ("any", 2)]
    (vote,) = found["double_votes"]
    assert (vote["peer"], vote["kind"], vote["round"], vote["view"], vote["found_in"]) == (
        EVE.peer_id, "prevote", 4, 0, 4,
    )  # fmt: skip
    evidence = commit_at(run, 5).body.value.evidence[0]
    assert vote["records"] == [unseal(evidence.first).id.hex(), unseal(evidence.second).id.hex()]
    assert main(["verify", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("note: ") for line in lines[:-1]] == found["notes"]
    assert lines[0].startswith("note: round 1 rests on a majority: ")
    assert lines[1].startswith("note: round 3 rests on whoever was there: ")
    assert lines[4] == (
        f"note: round 4 removed {EVE.peer_id}, who signed two different prevotes in view 0 of round 4"
    )  # fmt: skip
    assert lines[-1] == "verified: 5 rounds, 10 contributions, 5 state roots, 0 problems"


def test_rounds_in_a_row_share_a_note() -> None:
    def commit(round_number: int, strength: str, *dropped: int) -> Degraded:
        return Degraded(round=round_number, strength=strength, dropped=dropped)

    weak = [commit(number, "majority") for number in (2, 3, 4)]
    weak += [commit(5, "any", 0, 2), commit(7, "any"), commit(8, "final", 1)]
    said = [line.split(":")[0] for line in notes(weak, [])]
    assert said == [
        "rounds 2 to 4 rest on a majority",
        "round 5 rests on whoever was there",
        "round 7 rests on whoever was there",
        "round 5 dropped the owners of groups 0, 2",
        "round 8 dropped the owners of group 1",
    ]
    assert list(notes([], [])) == []


def test_rows_say_how_strong_a_commit_is(played: RunLog) -> None:
    start, *commits = rows(played.run)
    assert start.strength == ""
    assert [row.strength for row in commits] == ["final", "majority", "final", "any", "final"]
    assert [set(row.consenting) for row in commits] == [set(), {ADA.peer_id, BOB.peer_id}, set(), {ADA.peer_id}, set()]
    assert [(row.votes, row.votes_total) for row in commits] == [(3, 3), (2, 3), (2, 2), (1, 3), (1, 1)]
    assert commits[1].dropped == commits[1].members[EVE.peer_id]
    assert set(commits[3].dropped) == {*commits[3].members[BOB.peer_id], *commits[3].members[EVE.peer_id]}
    assert [[vote.peer for vote in row.double_votes] for row in commits] == [[], [], [], [], [EVE.peer_id]]
    assert [row.epoch == before.id for before, row in itertools.pairwise(commits)] == [
        False, True, False, True,
    ]  # fmt: skip


def test_the_table_and_the_details_name_it(
    played: RunLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", str(played.home)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "majority, dropped group" in lines[4]
    assert "any, dropped groups" in lines[6]
    assert f"…{EVE.peer_id[-6:]} signed twice" in lines[7]
    assert main(["show", str(played.home), "--round", "4"]) == 0
    assert f"{EVE.peer_id}: two different prevotes in view 0 of round 4" in capsys.readouterr().out


def test_two_headers_are_evidence_too(opened: RunLog) -> None:
    pair = (opened.header(EVE), opened.header(EVE))
    opened.close_round(
        [opened.header(ADA), opened.header(BOB), pair[0]], evidence=[pair], voters=[ADA, BOB, EVE]
    )  # fmt: skip
    verifier = Verifier(opened.run)
    assert list(verifier.problems()) == []
    (vote,) = verifier.tally.double_votes
    assert (vote.kind, vote.view, vote.what) == ("header", None, "two different headers of round 1")
    assert EVE.peer_id not in {member.peer for member in opened.chain.head.members}


# ---- states over degraded rounds --------------------------------------------------------------------------------


def test_what_if_where_an_owner_is_gone(played: RunLog, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--threads", "1", "--allow-source", played.folder.as_uri()]
    for number, without, counted in ((1, BOB, [ADA]), (2, EVE, [ADA, BOB])):
        code = main(
            ["what-if", str(played.home), "--json", "--round", str(number), "--without", without.peer_id, *arguments]
        )
        assert code == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found["changed"]["peers"]) == {peer.peer_id for peer in counted}
        assert found["actual"]["state_root"] == commit_at(played.run, number + 1).body.state_root.hex()
        assert found["changed"]["state_root"] != found["actual"]["state_root"]
    assert main(["what-if", str(played.home), "--round", "1", "--without", EVE.peer_id, *arguments]) == 2
    assert "names no peer of those that counted in round 1" in capsys.readouterr().err


def test_the_groups_of_a_dropped_owner_stay_as_they_were(played: RunLog) -> None:
    """Round 1 merges no experts, so what nobody trained does not change."""
    (dropped,) = next(iter(rows(played.run, only_round=1))).dropped
    before, after = played.states.read(1), played.states.read(2)
    experts = {number: [n for n in before if f".experts.{number}." in n] for number in range(4)}
    assert all(experts.values())
    changed = {n: any(before[name].tobytes() != after[name].tobytes() for name in experts[n]) for n in range(4)}
    assert changed == {n: n not in (dropped, 3) for n in range(4)}  # of four groups the last has no owner


# ---- forgeries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [2, 4])
def test_who_is_dropped_cannot_be_changed(run: RunDir, position: int) -> None:
    """Not after the vote, and not by the voters themselves."""
    commit = commit_at(run, position)
    value = commit.body.value
    ada = next(iter(rows(run, only_round=position - 1))).members[ADA.peer_id]
    for dropped in ((), ada, (3,), (*value.dropped, 3)):
        changed = replace(value, dropped=dropped)
        rewrite_record(run, position, encode(replace(commit, body=replace(commit.body, value=changed))))
        assert first(run)[:2] == (position - 1, LEDGER)
        rewrite_record(run, position, encode(voted_again(commit, verify_set(changed), degraded=True)))
        assert first(run)[:2] == (position - 1, LEDGER)


@pytest.mark.parametrize("position", [2, 4])
def test_votes_without_consent_do_not_suffice(run: RunDir, position: int) -> None:
    commit = commit_at(run, position)
    value = verify_set(commit.body.value)
    assert voted_again(commit, value, degraded=True) == commit
    rewrite_record(run, position, encode(voted_again(commit, value, degraded=False)))
    assert first(run) == (position - 1, LEDGER, "votes")


def test_a_consent_is_signed(run: RunDir) -> None:
    """Neither can a vote be turned into one, nor one be taken out of the vote."""
    for position, mine, other in ((1, b"\xc2", b"\xc3"), (2, b"\xc3", b"\xc2")):
        data = records(run)[position][1]
        vote = commit_at(run, position).precommits[0]
        assert vote.count(b"degraded" + mine) == 1
        rewrite_record(run, position, data.replace(vote, vote.replace(b"degraded" + mine, b"degraded" + other)))
        assert first(run) == (position - 1, LEDGER, "signature")
        rewrite_record(run, position, data)
    assert sound(run)


def test_a_vote_missing_from_a_commit_of_few(run: RunDir) -> None:
    commit = commit_at(run, 2)
    rewrite_record(run, 2, encode(replace(commit, precommits=commit.precommits[:1])))
    assert first(run) == (1, LEDGER, "votes")


def test_a_run_that_pauses_takes_no_commit_of_few(tmp_path: Path) -> None:
    rounds = replace(make_manifest(tmp_path).rounds, on_majority_loss="pause")
    log = RunLog(tmp_path / "log", ownership=Ownership(groups=4, min_peers=3), rounds=rounds)
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])
    gone = [g for member in log.chain.head.members if member.peer != ADA.peer_id for g in member.groups]
    value = log.proposed([log.header(ADA)], dropped=sorted(gone))
    commit = log.commit(value, log.apply(value), [ADA], degraded=True)
    log.db.append_commit(encode(commit), 0, commit.id)
    log.close()
    assert first(log.run) == (0, LEDGER, "dropped")


def test_a_bit_in_the_evidence(run: RunDir) -> None:
    data = records(run)[5][1]
    pair = commit_at(run, 5).body.value.evidence[0]
    for envelope in (pair.first, pair.second):
        signature = envelope[envelope.index(b"signature") + len(b"signature") + 2 :][:64]
        for bit in (3, 8 * len(signature) - 1):
            rewrite_record(run, 5, flip_inside(data, signature, bit))
            assert first(run) == (4, LEDGER, "signature")
    rewrite_record(run, 5, data)
    assert sound(run)


def test_evidence_cannot_be_left_out_or_exchanged_later(run: RunDir) -> None:
    commit = commit_at(run, 5)
    pair = commit.body.value.evidence[0]
    for evidence in ((), (Evidence(first=pair.second, second=pair.first),)):
        value = replace(commit.body.value, evidence=evidence)
        rewrite_record(run, 5, encode(replace(commit, body=replace(commit.body, value=value))))
        assert first(run)[:2] == (4, LEDGER)
        assert first(run)[2] in ("commit", "votes")


def evidence_that_is_none(log: RunLog) -> dict[str, tuple[Any, Any]]:
    """Pairs of EVE's records that do not contradict one another, and one of a stranger's that do."""
    head = log.chain.head
    vote = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=b"")
    return {
        "the same": (seal(vote, EVE), seal(vote, EVE)),
        "two views": (seal(vote, EVE), seal(replace(vote, view=1), EVE)),
        "two epochs": (seal(vote, EVE), seal(replace(vote, epoch=bytes(32), value=bytes(32)), EVE)),
        "two peers": (seal(vote, EVE), seal(replace(vote, value=bytes(32)), BOB)),
        "two kinds": (seal(vote, EVE), log.header(EVE)),
        "another run": tuple(seal(replace(vote, run_id=bytes(32), value=v), EVE) for v in (b"", bytes(32))),
        "the future": tuple(seal(replace(vote, round=9, value=v), EVE) for v in (b"", bytes(32))),
    }


@pytest.mark.parametrize(
    "what", ["the same", "two views", "two epochs", "two peers", "two kinds", "another run", "the future"]
)
def test_evidence_that_all_agreed_on_and_is_none(opened: RunLog, what: str) -> None:
    log = opened
    headers = [log.header(peer) for peer in (ADA, BOB, EVE)]
    value = log.proposed(headers, evidence=[evidence_that_is_none(log)[what]])
    commit = log.commit(value, log.apply(value), [ADA, BOB, EVE])
    log.db.append_commit(encode(commit), 1, commit.id)
    assert first(log.run) == (1, LEDGER, "evidence")


def test_a_ledger_is_one_line(opened: RunLog) -> None:
    """What a reset takes back is not left standing before it."""
    log = opened
    named = log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)], voters=[ADA, BOB, EVE])
    lost = log.close_with(ADA, BOB)
    log.reset(named, named.after.members)
    assert sound(log.run)
    line = records(log.run)
    rewrite(log.run, [*line[:3], ("commit", lost.data), *line[3:]])
    assert first(log.run) == (3, LEDGER, "opening")


# ---- what was taken back ----------------------------------------------------------------------------------------


def branches(log: RunLog, folder: Path) -> tuple[list[Step], RunLog]:
    """`log` has gone on with ADA alone, a fork of it with a majority; both have two rounds more then."""
    other = log.fork(folder)
    mine = [log.close_with(ADA), log.close_round([log.header(ADA)], voters=[ADA])]
    other.close_with(ADA, BOB)
    other.close_round([other.header(ADA), other.header(BOB)])
    return mine, other


def test_a_better_branch_replaces_ours_and_the_log_is_whole(opened: RunLog, tmp_path: Path) -> None:
    log = opened
    mine, other = branches(log, tmp_path / "other")
    log.adopt(other)
    other.close()
    assert log.chain.head == other.chain.head
    verifier = Verifier(log.run)
    assert list(verifier.problems()) == []
    assert (verifier.tally.rounds, verifier.tally.snapshots) == (3, 4)
    assert verifier.tally.other_blobs == 4  # ADA's two contributions to the branch that lost
    found = taken_back(log.run)
    assert [(r.kind, r.round, r.id, r.parent, r.strength, r.checked) for r in found] == [
        ("commit", 1, mine[0].after.id, mine[0].before.id, "any", True),
        ("commit", 2, mine[1].after.id, mine[0].after.id, "final", True),
    ]
    assert [r.state_root for r in found] == [step.after.state_root for step in mine]


def test_a_reset_and_what_it_took_back_may_be_taken_back_themselves(opened: RunLog) -> None:
    """The parent of a record may be taken back after the record itself."""
    log = opened
    base = log.chain.head
    one = log.close_with(ADA, BOB)
    two = log.close_round([log.header(ADA), log.header(BOB)])
    reset = log.reset(one, one.after.members)
    with open_ledger(log.run) as db:
        step = next(s for s in Log(log.manifest, log.run.run_id, db).walk() if s.after.id == base.id)
    log.reset(step, step.after.members)
    found = taken_back(log.run)
    assert [(r.kind, r.round, r.id) for r in found] == [
        ("commit", 2, two.after.id),
        ("commit", 1, one.after.id),
        ("reset", 2, reset.after.id),
    ]
    assert all(r.checked for r in found)
    assert [r.strength for r in found] == ["final", "majority", ""]


def test_what_follows_nothing_known_is_said_not_to_be_checked(
    opened: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = opened
    assert main(["show", str(log.run.path), "--abandoned"]) == 0
    assert capsys.readouterr().out == "nothing was taken back\n"
    mine, other = branches(log, tmp_path / "other")
    log.adopt(other)
    other.close()
    with closing(sqlite3.connect(log.run.ledger_path)) as db, db:
        db.execute("DELETE FROM abandoned WHERE round = 1")
    (record,) = taken_back(log.run)
    assert (record.id, record.strength, record.checked) == (mine[1].after.id, "", False)
    assert main(["show", str(log.run.path), "--abandoned"]) == 0
    out = capsys.readouterr().out
    assert "unknown: not checked, for what the record follows is not in this log" in out
    assert max(map(len, out.splitlines())) <= 80
    assert mine[1].after.id.hex()[:12] in out
    for number, count in ((2, 1), (1, 0)):
        assert main(["show", str(log.run.path), "--abandoned", "--round", str(number), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["abandoned"]) == count


def test_a_taken_back_record_that_was_changed_is_not_shown(opened: RunLog, tmp_path: Path) -> None:
    log = opened
    mine, other = branches(log, tmp_path / "other")
    log.adopt(other)
    other.close()
    commit = mine[0].commit
    assert commit is not None
    for data in (mine[0].data[:-1], encode(replace(commit, precommits=by_signer([log.double_vote(ADA)[0]])))):
        with closing(sqlite3.connect(log.run.ledger_path)) as db, db:
            db.execute("UPDATE abandoned SET bytes = ? WHERE round = 1", (data,))
        with pytest.raises(IntegrityError, match="a commit that was taken back") as caught:
            taken_back(log.run)
        assert caught.value.check == "decode"
