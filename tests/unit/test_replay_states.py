"""`spes-replay export` and `what-if`: states taken out of a log, as they were and as they would have been."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from spes_client.replay import main
from spes_p2p.delta.contributions import apply_set, contributions
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.replay.log import Log, open_ledger
from spes_p2p.store.chain import Step
from spes_p2p.store.rundir import RunDir
from tests.unit.log_support import ADA, BOB, EVE, MODEL, RunLog, copy_log, flip_file, play


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    torch.set_num_threads(1)
    log = play(tmp_path_factory.mktemp("played"))
    log.close()
    return log


@pytest.fixture
def source(played: RunLog) -> list[str]:
    """The flags that let the log's data be read."""
    return ["--threads", "1", "--allow-source", played.folder.as_uri()]


def steps_of(run: RunDir) -> dict[int, Step]:
    with open_ledger(run) as db:
        return {s.before.round: s for s in Log(run.manifest.record, run.run_id, db).walk() if s.commit is not None}


def computed(log: RunLog, upto: int) -> dict[str, np.ndarray]:
    """S_upto from the seed and the blobs, in memory."""
    state = dict(genesis_tensors(MODEL, 2, log.manifest.seed))
    steps = steps_of(log.run)
    for number in range(upto):
        state = applied(log, steps[number], state)
    return state


def applied(log: RunLog, step: Step, state: dict[str, np.ndarray], without: str = "", **merging: Any) -> dict[str, Any]:
    manifest = replace(log.manifest, merging=replace(log.manifest.merging, **merging))
    assert step.value is not None
    counted = [c for c in contributions(step.before, step.value) if c.peer != without]
    after: dict[str, np.ndarray] = {}
    apply_set(manifest, step.before.step, counted, state, blob_path=log.blobs.path, write=after.__setitem__)
    return after


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(left[n].tobytes() == right[n].tobytes() for n in left)


# ---- export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "kept"), [(0, True), (0, False), (2, True), (4, True), (3, False)])
def test_a_state_is_exported_from_its_snapshot_or_computed(
    played: RunLog, source: list[str], number: int, kept: bool, tmp_path: Path
) -> None:
    run = copy_log(played, tmp_path)
    for stored in run.states().rounds() if not kept else ():
        run.states().remove(stored)
    out = tmp_path / "out"
    assert main(["export", str(run.path), "--round", str(number), str(out), *source]) == 0
    assert same(load_file(out / "model.safetensors"), computed(played, number))
    config = json.loads((out / "config.json").read_text())
    assert (config["num_experts"], config["hidden_size"], config["eos_token_id"]) == (4, 16, 0)
    assert (out / "tokenizer.json").read_bytes() == (played.folder / "tokenizer.json").read_bytes()
    assert not list(run.path.glob(".replay-*"))


def test_without_a_round_the_newest_state_is_exported(
    played: RunLog, source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(played.home), str(tmp_path / "out"), "--json", *source]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["round"], found["state_root"]) == (5, played.chain.head.state_root.hex())


def export_error(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert main(["export", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_the_tokenizer_must_be_the_runs(played: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = copy_log(played, tmp_path), tmp_path / "out"
    shutil.rmtree(run.cache_dir)
    error = export_error(capsys, 2, run.path, out)
    assert "--tokenizer FILE" in error
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "the run's tokenizer" in export_error(capsys, 2, run.path, out, "--tokenizer", other)
    assert "cannot read" in export_error(capsys, 2, run.path, out, "--tokenizer", tmp_path / "none.json")
    assert not out.exists()
    assert main(["export", str(run.path), str(out), "--tokenizer", str(played.folder / "tokenizer.json")]) == 0


def test_what_cannot_be_exported_is_said(
    played: RunLog, source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = copy_log(played, tmp_path), tmp_path / "out"
    assert "states of rounds 0 to 5, not of round 6" in export_error(capsys, 2, run.path, out, "--round", 6, *source)
    flip_file(run.states().path(3))
    assert "leaf_digest failed" in export_error(capsys, 1, run.path, out, "--round", 3, *source)
    run.states().remove(3)
    blob = next(iter(steps_of(run).values())).value.headers[0].record.sections[0].blob  # type: ignore[union-attr]
    run.states().remove(2)
    flip_file(run.blobs().path(blob))
    assert "blob_digest failed" in export_error(capsys, 1, run.path, out, "--round", 2, *source)
    assert not out.exists()
    out.mkdir()
    (out / "notes").touch()
    assert "is not an empty directory" in export_error(capsys, 2, run.path, out, *source)


# ---- what-if ----------------------------------------------------------------------------------------------------


def what_if(capsys: pytest.CaptureFixture[str], log: RunLog, source: list[str], *arguments: object) -> Any:
    assert main(["what-if", str(log.home), "--json", *map(str, arguments), *source]) == 0
    return json.loads(capsys.readouterr().out)


def loss(log: RunLog, state: dict[str, np.ndarray]) -> float:
    tokens = np.load(log.folder / "heldout.npy")
    return bits_per_byte(state, MODEL, 2, tokens, log.manifest.data.heldout_bytes, threads=1)


def test_leaving_out_a_peer(played: RunLog, source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = what_if(capsys, played, source, "--round", 1, "--without", BOB.peer_id)
    step, before = steps_of(played.run)[1], computed(played, 1)
    for name, without in (("actual", ""), ("changed", BOB.peer_id)):
        assert found[name]["bits_per_byte"] == loss(played, applied(played, step, before, without))
        assert (BOB.peer_id in found[name]["peers"]) == (not without)
        assert found[name]["merge_alpha"] is None
    assert found["actual"]["state_root"] == step.after.state_root.hex() != found["changed"]["state_root"]
    assert found["difference_bits_per_byte"] == found["changed"]["bits_per_byte"] - found["actual"]["bits_per_byte"]
    assert found["difference_bits_per_byte"] != 0


def test_another_merge_strength(played: RunLog, source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = what_if(capsys, played, source, "--round", 2, "--alpha", 0.9)
    step, before = steps_of(played.run)[2], computed(played, 2)
    assert found["changed"]["bits_per_byte"] == loss(played, applied(played, step, before, alpha=0.9))
    assert found["actual"]["merge_alpha"] == pytest.approx(0.2 * 996 / 1000)
    assert found["changed"]["merge_alpha"] == pytest.approx(0.9 * 996 / 1000)
    assert found["changed"]["state_root"] != found["actual"]["state_root"]


def test_the_manifests_own_strength_changes_nothing(
    played: RunLog, source: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = what_if(capsys, played, source, "--round", 0, "--alpha", 0.2)
    assert found["changed"] == found["actual"]


def test_a_peer_may_be_named_by_the_end_of_its_id(
    played: RunLog, source: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = what_if(capsys, played, source, "--round", 1, "--without", "…" + ADA.peer_id[-6:])
    assert ADA.peer_id not in found["changed"]["peers"]


def test_a_damaged_blob_of_the_round_is_named(
    played: RunLog, source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_log(played, tmp_path)
    blob = steps_of(run)[1].value.headers[0].record.sections[0].blob  # type: ignore[union-attr]
    flip_file(run.blobs().path(blob))
    assert main(["what-if", str(run.path), "--round", "1", "--without", EVE.peer_id, *source]) == 1
    assert f"blob_digest failed for {run.blobs().path(blob)}" in capsys.readouterr().err


def test_the_comparison_is_a_table(played: RunLog, source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(played.home), "--round", "1", "--without", EVE.peer_id, *source]) == 0
    out = capsys.readouterr().out
    assert "as it was" in out
    assert "changed" in out
    assert "bits per byte" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--round", "1"], "nothing is changed"),
        (["--without", "x"], "required: --round"),
        (["--round", "9", "--without", "x"], "no commit of round 9"),
        (["--round", "1", "--without", "zzz"], "names no peer of those that counted in round 1"),
        (["--round", "3", "--without", EVE.peer_id], "names no peer of those that counted in round 3"),
        (["--round", "1", "--without", ""], "names no peer"),
        (["--round", "1", "--alpha", "0.5"], "round 1 (schedule steps 2 to 3) merges no experts"),
        (["--round", "0", "--alpha", "2"], "expected a number from 0 to 1"),
    ],
)
def test_what_cannot_be_asked_is_said(
    played: RunLog, source: list[str], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(played.home), *arguments, *source]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert says in captured.err


def test_local_data_needs_leave(played: RunLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_log(played, tmp_path)
    shutil.rmtree(run.cache_dir)
    assert main(["what-if", str(run.path), "--round", "1", "--without", ADA.peer_id]) == 2
    assert "--allow-source" in capsys.readouterr().err


def test_the_example_of_the_page_runs(played: RunLog) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"path": played.home, "rounds": 4}
    exec(code, names)
    assert same(dict(names["state"]), computed(played, 4))
