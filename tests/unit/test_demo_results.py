"""What a demo reads from the homes of its volunteers, on logs made by hand, and what its benchmark makes of it."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spes_client.demo_measure import measured
from spes_client.demo_results import Result, read_homes, replay_problems
from spes_client.demo_run import Outcome
from spes_client.demo_setup import Plan
from spes_p2p.crypto.envelope import seal
from spes_p2p.store.chain import Chain
from spes_p2p.store.rundir import RunDir
from spes_protocols.messages import Precommit
from tests.unit.log_support import ADA, BOB, ORGANIZER, RunLog

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Plan, RunLog]:
    """A plan whose two volunteers have the same log of three rounds."""
    log = RunLog(tmp_path / "made")
    log.start([log.claim(ADA), log.claim(BOB)])
    for _ in range(ROUNDS):
        log.close_round([log.header(ADA), log.header(BOB)])
    log.close()
    plan = Plan(folder=tmp_path / "demo", rounds=ROUNDS, peers=2)
    for home in plan.volunteer_homes:
        shutil.copytree(log.home, home)
    return plan, log


def home_of(plan: Plan, log: RunLog, number: int) -> Path:
    """The run directory of a volunteer."""
    return plan.volunteer_homes[number] / "runs" / log.run.run_id.hex()


def test_equal_homes_are_as_they_should_be(demo: tuple[Plan, RunLog]) -> None:
    plan, log = demo
    evidence = read_homes(plan)
    assert evidence.root_problems == ()
    assert evidence.ownership_problems == ()
    sizes = [path.stat().st_size for path in log.run.blobs_dir.iterdir()]
    assert evidence.contribution_bytes == round(sum(sizes) / (2 * ROUNDS))


def test_a_missing_last_state_is_a_problem(demo: tuple[Plan, RunLog]) -> None:
    plan, log = demo
    for path in (home_of(plan, log, 1) / "snapshots").glob(f"{ROUNDS}.*"):
        path.unlink()
    assert read_homes(plan).root_problems == ("volunteer-2 has no state after the last round",)


def test_a_run_that_went_elsewhere_is_a_problem(demo: tuple[Plan, RunLog]) -> None:
    plan, _ = demo
    shorter = Plan(folder=plan.folder, rounds=ROUNDS - 1, peers=2)
    assert "volunteer-1 has the commits of rounds [1, 2, 3]" in read_homes(shorter).root_problems


def test_a_vote_for_another_root_is_a_problem(demo: tuple[Plan, RunLog]) -> None:
    plan, log = demo
    run = RunDir.open(home_of(plan, log, 0))
    with run.ledger() as db:
        step = Chain(log.manifest, run.run_id, db).commit_step(1)
        assert step is not None
        assert step.value is not None
        head, value_id = step.before, step.value.id
        vote = Precommit(
            run_id=run.run_id, epoch=head.epoch, round=1, view=1, value=value_id, state_root=bytes(32)
        )  # fmt: skip
        db.record_vote(vote.epoch, vote.round, vote.view, Precommit.KIND, seal(vote, ADA).raw)
    assert read_homes(plan).root_problems == ("volunteer-1 voted for another root in round 1",)


def test_a_vacant_group_is_a_problem(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "made")
    log.start([log.claim(ADA)])
    log.close_round([log.header(ADA)], voters=[ADA])
    log.close()
    plan = Plan(folder=tmp_path / "demo", rounds=1, peers=1)
    shutil.copytree(log.home, plan.volunteer_homes[0])
    assert read_homes(plan).ownership_problems == ()
    two = Plan(folder=plan.folder, rounds=1, peers=2)
    shutil.copytree(log.home, two.volunteer_homes[1])
    assert len(read_homes(two).ownership_problems) == 2


def test_every_state_is_measured_by_one_of_the_processes(demo: tuple[Plan, RunLog]) -> None:
    _, log = demo
    folder = log.folder
    whole = dict(measured(log.run, 0, 1, folder))
    halves = dict(measured(log.run, 0, 2, folder)) | dict(measured(log.run, 1, 2, folder))
    assert sorted(whole) == list(range(ROUNDS + 1))
    assert halves == whole
    assert len(set(whole.values())) == ROUNDS + 1


def verified(**changes: Any) -> bytes:
    """What `spes-replay verify --json` prints of a good log of three rounds."""
    good = {"ok": True, "problems": [], "unchecked": [], "rounds": ROUNDS, "state_roots": ROUNDS}
    return json.dumps(good | changes).encode()


def test_replay_has_to_have_checked_everything() -> None:
    assert replay_problems(verified(), ROUNDS) == ()
    assert replay_problems(verified(rounds=2), ROUNDS)
    assert replay_problems(verified(state_roots=2), ROUNDS)
    assert replay_problems(verified(unchecked=["round 0"]), ROUNDS) == ("replay could not check: round 0",)
    problem = {"round": 1, "file": "blobs/ab", "check": "blob_digest", "detail": "differs"}
    found = replay_problems(verified(ok=False, problems=[problem]), ROUNDS)
    assert found[0] == "replay of round 1: blob_digest: differs"


GOOD = Result(
    rounds=10,
    peers=4,
    bits_per_byte=[2.3, 1.98],
    state_roots_equal=True,
    replay_ok=True,
    ownership_exclusive=True,
    contribution_bytes=1000,
    bytes_up_per_peer_round=1100,
    seconds=50.0,
)


def failed(result: Result, plan: Plan) -> list[str]:
    """The conditions that do not hold, of a run whose first state was worth 2.8 bits per byte."""
    outcome = Outcome(result=result, bits_per_byte_before=2.8, problems=())
    return [condition.name for condition in outcome.conditions(plan) if not condition.ok]


def test_the_default_demo_has_to_beat_bz2_and_others_to_learn(tmp_path: Path) -> None:
    default, other = (Plan(folder=tmp_path, rounds=rounds, peers=4) for rounds in (10, 2))
    assert failed(GOOD, default) == []
    assert failed(replace(GOOD, bits_per_byte=[1.9, 1.99]), default) == ["held-out bits per byte"]
    assert failed(replace(GOOD, bits_per_byte=[2.9, 2.7]), other) == []
    assert failed(replace(GOOD, bits_per_byte=[2.7, 2.8]), other) == ["held-out bits per byte"]
    wrong = replace(GOOD, state_roots_equal=False, replay_ok=False, ownership_exclusive=False)
    assert failed(wrong, other) == ["state roots", "replay", "ownership"]


def test_the_benchmark_reads_a_demo(demo: tuple[Plan, RunLog]) -> None:
    plan, log = demo
    phases = ("train", "encode", "publish", "transfer", "check", "agree", "apply", "wait")

    def mark(round_number: int) -> dict[str, Any]:
        """Rounds of 8, 16, 24 seconds, shared out evenly."""
        seconds = sum(range(round_number + 1))
        return {"round": round_number, "at_seconds": 8.0 * seconds, "phases": dict.fromkeys(phases, float(seconds))}

    plan.timings.write_text(json.dumps({"volunteer-1": [mark(r) for r in range(ROUNDS + 1)]}))
    result = asdict(replace(GOOD, rounds=ROUNDS, peers=2))
    plan.result.write_text(json.dumps(result))
    plan.signed_run.write_bytes(seal(log.manifest, ORGANIZER).raw)
    command = [sys.executable, str(ROOT / "benchmarks" / "round.py"), "--dir", str(plan.folder)]
    figures = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert figures["round_seconds"] == 20.0  # without the first round
    assert figures["phase_seconds"] == dict.fromkeys(phases, 2.5)
    sent = {method: size["bytes_up_per_peer_round"] for method, size in figures["bytes"].items()}
    assert sent["spes_p2p"] == 1100
    everything = sum(array.nbytes for array in log.run.states().read(0).values())
    assert sent["diloco"] == everything
    assert 1000 < sent["fp32_spes"] < sent["diloco"]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "train: the local steps" in table
