"""`spes-replay verify`: a sound log passes, and whatever is changed in one is found with round, file and check."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spes_client.replay import main
from spes_p2p.crypto.envelope import seal, unseal, verify_set
from spes_p2p.replay.fetch import wanted_blobs
from spes_p2p.replay.log import Log
from spes_p2p.replay.problems import Problem
from spes_p2p.replay.verify import Tally, Verifier
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode, encode
from spes_protocols.errors import IntegrityError, UserError
from spes_protocols.messages import Commit, Precommit, ProposedSet, Refusal, Signed, Start
from tests.unit.log_support import (
    ADA,
    BOB,
    EVE,
    ORGANIZER,
    RunLog,
    by_signer,
    copy_log,
    flip,
    flip_file,
    flip_inside,
    make_manifest,
    play,
    records,
    rewrite,
    rewrite_record,
)

LEDGER = "ledger.sqlite"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = play(tmp_path_factory.mktemp("played"))
    log.close()
    return log


@pytest.fixture
def run(played: RunLog, tmp_path: Path) -> RunDir:
    """A copy of the played log, to be damaged."""
    return copy_log(played, tmp_path)


def check(run: RunDir, **options: Any) -> tuple[list[Problem], Tally]:
    """Every problem of a log, and the tally."""
    verifier = Verifier(run, **options)
    return list(verifier.problems()), verifier.tally


def first(run: RunDir, **options: Any) -> tuple[int | None, str, str]:
    """Round, file and check of the first problem of a log."""
    verifier = Verifier(run, **options)
    with closing(verifier.problems()) as problems:
        problem = next(problems)
    return problem.round, problem.file.relative_to(run.path).as_posix(), problem.check


def commit_at(run: RunDir, position: int) -> Commit:
    return decode(Commit, records(run)[position][1])


# ---- a sound log ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sound_log_verifies(run: RunDir, threads: int) -> None:
    problems, tally = check(run, threads=threads)
    assert problems == []
    assert (tally.rounds, tally.contributions, tally.refusals, tally.state_roots) == (5, 11, 3, 5)
    assert (tally.snapshots, tally.other_blobs, tally.unchecked) == (4, 2, [])


def test_a_log_without_rounds_verifies(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.close()
    problems, tally = check(log.run)
    assert (problems, tally.rounds, tally.snapshots, tally.unchecked) == ([], 0, 1, [])


def test_two_states_at_a_time_are_on_disk_and_none_in_the_end(run: RunDir, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    counts = []
    problems, _ = check(run, work=work, report=lambda what, share: counts.append(len(list(work.glob("*/*.index")))))
    assert problems == []
    assert max(counts) == 1  # between rounds; the next state makes it two
    assert list(work.iterdir()) == []


def test_a_log_with_a_reset_verifies(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start([log.claim(ADA), log.claim(BOB)])
    first_commit = log.close_round([log.header(ADA), log.header(BOB)])
    for _ in range(2):
        log.close_round([log.header(ADA), log.header(BOB)])
    log.reset(first_commit, first_commit.after.members)
    log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    problems, tally = check(log.run)
    assert problems == []
    assert (tally.rounds, tally.state_roots, tally.snapshots) == (2, 2, 3)


# ---- a bit in any file ------------------------------------------------------------------------------------------


def test_a_bit_in_any_blob(run: RunDir) -> None:
    with run.ledger() as db:
        rounds = {w.section.blob: w.round for w in wanted_blobs(Log(run.manifest.record, run.run_id, db))}
    blobs = run.blobs()
    assert len(blobs.digests()) == len(rounds) + 2
    dice = random.Random(1)
    for digest in blobs.digests():
        path = blobs.path(digest)
        whole = path.read_bytes()
        flip_file(path, dice.randrange(8 * len(whole)))
        # Blobs are checked whether or not they are applied, and this is quicker.
        assert first(run, from_snapshot=5) == (rounds.get(digest), f"blobs/{digest.hex()}", "blob_digest")
        path.write_bytes(whole)
    assert check(run)[0] == []


def parts_of_a_commit(commit: Commit) -> dict[str, bytes]:
    value = commit.body.value
    return {
        "header": value.headers[0],
        "refused header": value.refusals[0].header if value.refusals else b"",
        "claim": value.claims[0] if value.claims else b"",
        "vote": commit.precommits[1],
    }


@pytest.mark.parametrize(("part", "position"), [("header", 2), ("refused header", 3), ("claim", 1), ("vote", 5)])
def test_a_bit_in_any_record_of_a_commit(run: RunDir, part: str, position: int) -> None:
    data = records(run)[position][1]
    inside = parts_of_a_commit(decode(Commit, data))[part]
    signature = unseal_signature(inside)
    for bit in (3, 8 * len(signature) - 1):
        rewrite_record(run, position, flip_inside(data, signature, bit))
        assert first(run) == (position - 1, LEDGER, "signature")


def unseal_signature(envelope: bytes) -> bytes:
    """The signature's bytes in an envelope."""
    return envelope[envelope.index(b"signature") + len(b"signature") + 2 :][:64]


def test_no_bit_of_the_ledger_may_change(run: RunDir) -> None:
    rows, dice = records(run), random.Random(2)
    for position, (_, data) in enumerate(rows):
        for _ in range(6):
            rewrite_record(run, position, flip(data, dice.randrange(8 * len(data))))
            with run.ledger() as db, pytest.raises(IntegrityError, match=f"record {position}") as caught:
                list(Log(run.manifest.record, run.run_id, db).walk())
            assert caught.value.check
        rewrite_record(run, position, data)
    assert check(run)[0] == []


def test_a_bit_in_the_start_record(run: RunDir) -> None:
    data = records(run)[0][1]
    rewrite_record(run, 0, flip(data, 8 * data.rindex(b"members") + 100))
    assert first(run) == (0, LEDGER, "signature")


def test_a_bit_in_a_claim_that_the_start_was_made_from(tmp_path: Path) -> None:
    """The organizer signed a broken claim: the start's own signature is good."""
    log = RunLog(tmp_path)
    broken = log.claim(BOB)
    log.start([log.claim(ADA), Signed(broken.record, broken.signer, flip(broken.raw, 8 * len(broken.raw) - 1))])
    log.close()
    assert first(log.run)[:2] == (0, LEDGER)


@pytest.mark.parametrize("number", [0, 2, 3, 5])
def test_a_bit_in_any_snapshot(run: RunDir, number: int) -> None:
    states, dice = run.states(), random.Random(number)
    for path, checks in (
        (states.path(number), {"leaf_digest", "decode"}),
        (states.index_path(number), {"state_root", "shapes", "decode"}),
    ):
        whole = path.read_bytes()
        flip_file(path, dice.randrange(8 * len(whole)))
        found_round, file, failed = first(run, from_snapshot=5)
        assert (found_round, file) == (number, f"snapshots/{path.name}")
        assert failed in checks
        path.write_bytes(whole)


@pytest.mark.parametrize("bit", [100, 2000, 7000])
def test_a_bit_in_the_manifest(run: RunDir, bit: int, capsys: pytest.CaptureFixture[str]) -> None:
    flip_file(run.manifest_path, bit)
    assert main(["verify", str(run.path), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["round"], problem["file"]) == (0, "manifest")
    assert problem["check"] in ("signature", "decode", "identity")


def test_a_bit_in_an_own_vote_or_header(run: RunDir) -> None:
    for table in ("own_votes", "own_headers"):
        with sqlite3.connect(run.ledger_path) as db:
            (raw,) = db.execute(f"SELECT raw FROM {table} WHERE round = 3").fetchone()
            db.execute(f"UPDATE {table} SET raw = ? WHERE round = 3", (flip(raw, 4 * len(raw)),))
        found_round, file, _ = first(run)
        assert (found_round, file) == (3, LEDGER)
        with sqlite3.connect(run.ledger_path) as db:
            db.execute(f"UPDATE {table} SET raw = ? WHERE round = 3", (raw,))
    assert check(run)[0] == []


# ---- what is missing --------------------------------------------------------------------------------------------


def counted_blob(run: RunDir, position: int) -> bytes:
    """A blob of the first contribution that counts in the commit at a position."""
    value = verify_set(commit_at(run, position).body.value)
    return value.headers[0].record.sections[0].blob


def test_a_missing_blob(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    digest = counted_blob(run, 3)
    run.blobs().remove(digest)
    assert first(run) == (2, f"blobs/{digest.hex()}", "blob_digest")
    assert main(["verify", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert "the file is missing" in out
    assert "--from-snapshot N (stored: 0, 2, 3, 5)" in out
    assert out.splitlines()[-1].startswith("failed: 2 rounds, 5 contributions, 2 state roots, 1 problem; ")


def test_a_missing_blob_of_a_refused_contribution_is_said_not_to_be_checked(run: RunDir) -> None:
    for position, check_name in ((3, "finite"), (4, "norm")):
        value = verify_set(commit_at(run, position).body.value)
        ((refused_for, header),) = value.refused
        assert refused_for == check_name
        run.blobs().remove(header.record.sections[0].blob)
    problems, tally = check(run)
    assert problems == []
    assert (tally.state_roots, len(tally.unchecked)) == (5, 3)
    assert tally.unchecked[0].startswith("round 2: refusal of 12D3KooW")
    assert tally.unchecked[1] == "round 3: norms, for want of blobs"


def prune(run: RunDir, before: int) -> int:
    """Remove the blobs of the rounds before one, and the states; how many blobs went."""
    with run.ledger() as db:
        old = [w for w in wanted_blobs(Log(run.manifest.record, run.run_id, db)) if w.round < before]
    for wanted in old:
        run.blobs().remove(wanted.section.blob)
    for number in [n for n in run.states().rounds() if n < before]:
        run.states().remove(number)
    return len(old)


def test_a_pruned_log_verifies_from_its_snapshot_and_says_what_was_not_checked(run: RunDir) -> None:
    removed = prune(run, 3)
    assert removed == 14
    assert first(run)[0] == 0
    problems, tally = check(run, from_snapshot=3)
    assert problems == []
    assert (tally.rounds, tally.contributions, tally.state_roots, tally.snapshots) == (5, 4, 2, 2)
    assert tally.unchecked == [
        f"rounds 0 to 2: state roots, which were not recomputed; {removed} of their blobs are not in this log"
    ]


def test_a_pruned_log_is_not_trusted_for_what_is_left_of_it(run: RunDir) -> None:
    kept = counted_blob(run, 2)
    data = run.blobs().path(kept).read_bytes()
    prune(run, 3)
    run.blobs().path(kept).write_bytes(flip(data, 99))
    assert first(run, from_snapshot=3) == (1, f"blobs/{kept.hex()}", "blob_digest")
    run.blobs().remove(kept)
    flip_file(run.states().path(3))
    assert first(run, from_snapshot=3) == (3, "snapshots/3.safetensors", "leaf_digest")


def test_a_snapshot_that_is_not_there_is_a_usage_error(run: RunDir) -> None:
    with pytest.raises(UserError, match="no snapshot of round 4 in this log; stored: 0, 2, 3, 5"):
        check(run, from_snapshot=4)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_database(run: RunDir, share: float) -> None:
    size = run.ledger_path.stat().st_size
    os.truncate(run.ledger_path, int(size * share))
    found_round, file, failed = first(run)
    assert (found_round, file, failed) == (None, LEDGER, "ledger")
    assert run.ledger_path.stat().st_size == int(size * share)


def test_no_ledger_is_a_usage_error(run: RunDir) -> None:
    run.ledger_path.unlink()
    with pytest.raises(UserError, match=r"has no ledger\.sqlite; fetch the log with"):
        check(run)
    assert not run.ledger_path.exists()


def test_a_commit_removed_from_the_middle(run: RunDir) -> None:
    rows = records(run)
    rewrite(run, rows[:3] + rows[4:])
    assert first(run) == (2, LEDGER, "commit")


def test_two_commits_swapped(run: RunDir) -> None:
    rows = records(run)
    rewrite(run, [*rows[:2], rows[3], rows[2], *rows[4:]])
    assert first(run) == (1, LEDGER, "commit")


def test_commits_removed_from_the_end_are_missed_by_the_snapshots(run: RunDir) -> None:
    rewrite(run, records(run)[:4])
    assert first(run) == (5, LEDGER, "ledger")


def test_the_last_state_may_be_ahead_of_the_ledger(run: RunDir) -> None:
    """A peer applies a set before it is agreed on."""
    rewrite(run, records(run)[:5])
    problems, tally = check(run)
    assert (problems, tally.rounds, tally.snapshots, tally.unchecked) == ([], 4, 3, [])
    flip_file(run.states().path(5))
    assert first(run) == (5, "snapshots/5.safetensors", "leaf_digest")


# ---- forgeries --------------------------------------------------------------------------------------------------


@pytest.fixture
def two_rounds(tmp_path: Path) -> Iterator[RunLog]:
    """A log after two rounds, to be gone on with; EVE is a standby."""
    log = RunLog(tmp_path / "two")
    log.start([log.claim(ADA), log.claim(BOB)])
    log.close_round([log.header(ADA), log.header(BOB)], claims=[log.claim(EVE, wants=0)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)])
    yield log
    log.close()


def test_a_vote_by_somebody_without_groups_is_none(run: RunDir) -> None:
    commit = commit_at(run, 4)
    votes = [unseal(raw, Precommit) for raw in commit.precommits]
    forged = [vote for vote in votes if vote.signer == ADA.peer_id] + [seal(votes[0].record, EVE)]
    rewrite_record(run, 4, encode(replace(commit, precommits=by_signer(forged))))
    assert first(run) == (3, LEDGER, "votes")


def test_a_vote_for_another_root_is_none(run: RunDir) -> None:
    commit = commit_at(run, 4)
    vote = unseal(commit.precommits[0], Precommit)
    forged = seal(replace(vote.record, state_root=bytes(32)), ADA)
    other = [raw for raw in commit.precommits if unseal(raw).signer == BOB.peer_id]
    rewrite_record(run, 4, encode(replace(commit, precommits=(forged.raw, *other))))
    assert first(run) == (3, LEDGER, "votes")


def test_a_root_that_all_agreed_on_and_nobody_computed(two_rounds: RunLog) -> None:
    log = two_rounds
    log.close_round([log.header(ADA), log.header(BOB)], root=bytes(32))
    problems, tally = check(log.run)
    assert [(p.round, p.file.name, p.check) for p in problems] == [(2, LEDGER, "state_root")]
    assert "the commit says root 0000" in problems[0].detail
    assert tally.state_roots == 2


def test_a_contribution_that_counted_and_should_not_have(two_rounds: RunLog) -> None:
    log = two_rounds
    eve = log.header(EVE, finite=False)
    log.close_round([log.header(ADA), log.header(BOB), eve], root=bytes(32))
    (problem,), tally = check(log.run)
    assert (problem.round, problem.file.parent.name, problem.check) == (2, "blobs", "finite")
    assert problem.file.name == eve.record.sections[0].blob.hex()
    assert problem.peer == EVE.peer_id
    assert tally.unchecked == [
        "round 2: norms, for want of blobs",
        "the state root of each of these rounds rests on what failed: 2",
    ]


def test_a_contribution_that_counted_in_spite_of_its_norm(two_rounds: RunLog) -> None:
    log = two_rounds
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE, scale=10.0)])
    (problem,), _ = check(log.run)
    assert (problem.round, problem.check, problem.peer) == (2, "norm", EVE.peer_id)


@pytest.mark.parametrize(
    ("claimed", "finite", "says"),
    [
        ("finite", True, "refused for finite, but it fails no check"),
        ("shapes", False, "refused for shapes, but it fails finite"),
        ("blob_digest", True, "refused for blob_digest, but it fails no check"),
        ("norm", True, "refused for norm, but its norms are within 10 times the median of the set"),
        ("norm", False, "refused for norm, but it fails finite"),
    ],
)
def test_a_refusal_under_a_wrong_name(two_rounds: RunLog, claimed: str, finite: bool, says: str) -> None:
    log = two_rounds
    log.close_round([log.header(ADA), log.header(BOB)], refused=[(claimed, log.header(EVE, finite=finite))])
    (problem,), tally = check(log.run)
    assert (problem.round, problem.file.name, problem.check) == (2, LEDGER, "refusal")
    assert (problem.detail, problem.peer) == (says, EVE.peer_id)
    assert tally.state_roots == 3


def test_a_refusal_that_the_header_itself_disproves(two_rounds: RunLog) -> None:
    log = two_rounds
    head = log.chain.head
    value = verify_set(
        ProposedSet(
            run_id=head.run_id,
            epoch=head.epoch,
            round=head.round,
            parent=head.id,
            headers=by_signer([log.header(ADA), log.header(BOB)]),
            refusals=(Refusal(check="sections", header=log.header(EVE).raw),),
        )
    )
    commit = log.commit(value, log.apply(value))
    log.db.append_commit(encode(commit), head.round, commit.id)
    assert first(log.run) == (2, LEDGER, "refusal")


def test_a_blob_of_another_size_than_its_header_says(two_rounds: RunLog) -> None:
    log = two_rounds
    ada, bob = log.header(ADA), log.header(BOB)
    section = bob.record.sections[0]
    lying = replace(bob.record, sections=(replace(section, size=section.size - 1), *bob.record.sections[1:]))
    log.close_round([ada, seal(lying, BOB)])
    assert first(log.run) == (2, f"blobs/{section.blob.hex()}", "size")


def test_a_start_by_a_stranger(run: RunDir) -> None:
    start = unseal(records(run)[0][1], Start)
    rewrite_record(run, 0, seal(start.record, EVE).raw)
    assert first(run) == (0, LEDGER, "identity")


def test_a_manifest_whose_first_state_does_not_follow_from_its_seed(tmp_path: Path) -> None:
    manifest = replace(make_manifest(tmp_path), genesis_root=bytes(32))
    run = RunDir.create(tmp_path / "home", seal(manifest, ORGANIZER).raw)
    run.ledger().close()
    assert first(run) == (0, "manifest", "state_root")


# ---- going on, and the command ----------------------------------------------------------------------------------


def test_with_all_it_goes_on_from_a_stored_state(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    digest = counted_blob(run, 2)
    flip_file(run.blobs().path(digest))
    flip_file(run.states().path(5))
    flip_file(run.states().index_path(0), 1000)
    assert main(["verify", str(run.path), "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(p["round"], p["file"], p["check"]) for p in found["problems"][:1]] == [
        (1, f"blobs/{digest.hex()}", "blob_digest")
    ]
    assert [(p["round"], p["file"]) for p in found["problems"][1:]] == [
        (0, "snapshots/0.index"),
        (5, "snapshots/5.safetensors"),
    ]
    assert found["state_roots"] == 4
    assert found["ok"] is False
    assert found["unchecked"] == [
        "round 1: norms, for want of blobs",
        "the state root of each of these rounds rests on what failed: 1",
    ]


def test_with_all_a_broken_record_does_not_hide_the_rest(run: RunDir) -> None:
    rewrite_record(run, 4, flip(records(run)[4][1], 5000))
    flip_file(run.states().path(2))
    problems, tally = check(run)
    assert [(p.round, p.file.name) for p in problems] == [(3, LEDGER), (2, "2.safetensors")]
    assert tally.unchecked[0] == "what follows record 4 of the ledger"


def test_the_command_says_one_line_and_needs_no_torch(played: RunLog) -> None:
    code = (
        "import sys; from spes_client.replay import main; code = main(['verify', sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(played.home)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "verified: 5 rounds, 11 contributions, 5 state roots, 0 problems\n"


def test_a_failure_is_named_on_one_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    digest = counted_blob(run, 1)
    flip_file(run.blobs().path(digest))
    assert main(["verify", str(run.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"round 0: blobs/{digest.hex()}: blob_digest failed: shared: its SHA-256 is ")
    assert lines[0].endswith(f" (of {min(ADA.peer_id, BOB.peer_id)})")
    assert lines[-1] == "failed: 0 rounds, 0 contributions, 0 state roots, 1 problem; stopped there, --all goes on"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command given"),
        (["verify"], "required: DIR"),
        (["verify", "."], "no run at ."),
        (["verify", "DIR", "--from-snapshot", "7"], "no snapshot of round 7"),
        (["verify", "DIR", "--work", "nowhere"], "create it, or name another with --work DIR"),
    ],
)
def test_errors_of_use_are_one_line(
    run: RunDir, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    assert main([str(run.path) if a == "DIR" else a for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert says in captured.err
