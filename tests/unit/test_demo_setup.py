"""The demo before its processes: how many groups, which directories it takes, what it signs."""

import hashlib
import json
from pathlib import Path

import pytest

from spes_client import demo_setup
from spes_client.demo_setup import Plan, prepare
from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_protocols.codec import to_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Data, Shard, Source, Tokenizer


def quiet(what: str, fraction: float) -> None:
    """Nobody watches."""


def plan(folder: Path, rounds: int = 10, peers: int = 4) -> Plan:
    return Plan(folder=folder, rounds=rounds, peers=peers)


def corpus(folder: Path) -> Data:
    """A prepared corpus as an earlier demo would have left it, of files with any content."""
    data_dir = folder / "data"
    data_dir.mkdir(parents=True)

    def shard(name: str) -> Shard:
        path = data_dir.resolve() / name
        path.write_text(name)
        return Shard(
            url=str(path), sha256=hashlib.sha256(name.encode()).hexdigest(), bytes=len(name), tokens=1000
        )  # fmt: skip

    tokenizer = shard("tokenizer.json")
    data = Data(
        sources=(Source(name="sotu", format="jsonl", shards=(shard("train-0.jsonl"),)),),
        heldout=Source(name="heldout", format="jsonl", shards=(shard("heldout.jsonl"),)),
        heldout_bytes=4000,
        tokenizer=Tokenizer(url=tokenizer.url, sha256=tokenizer.sha256, bytes=tokenizer.bytes, eos_id=0),
    )
    (data_dir / "data.json").write_text(json.dumps(to_plain(data)))
    return data


@pytest.mark.parametrize(("peers", "groups"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_every_volunteer_gets_a_group(tmp_path: Path, peers: int, groups: int) -> None:
    assert plan(tmp_path, peers=peers).groups == groups


def test_only_the_plain_demo_has_a_known_result(tmp_path: Path) -> None:
    assert plan(tmp_path).is_default
    assert not plan(tmp_path, rounds=11).is_default
    assert not plan(tmp_path, peers=5).is_default
    assert plan(tmp_path, rounds=10).kill_round == 5


def test_what_is_signed_fits_the_demo(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    wanted = plan(tmp_path, rounds=7, peers=3)
    manifest = prepare(wanted, fresh=False, report=quiet)

    signed = unseal_manifest(wanted.signed_run.read_bytes())
    assert signed.record == manifest
    assert signed.signer == Identity.load(wanted.organizer_key).peer_id
    assert manifest.data == data  # the corpus that was there, not prepared once more
    assert (manifest.ownership.groups, manifest.ownership.min_peers) == (4, 3)
    assert manifest.optimizer.total_steps == 7 * manifest.rounds.phases[0].steps
    assert manifest.genesis_root


def test_a_damaged_corpus_is_prepared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus(tmp_path)
    (tmp_path / "data" / "heldout.jsonl").write_text("another text")

    def prepare_sotu(out_dir: Path, vocab_size: int, *, report: object) -> Data:
        (out_dir / "heldout.jsonl").write_text("heldout.jsonl")
        return data

    monkeypatch.setattr("spes_p2p.data.corpus.prepare_sotu", prepare_sotu)
    prepare(plan(tmp_path), fresh=False, report=quiet)
    assert (tmp_path / "data" / "heldout.jsonl").read_text() == "heldout.jsonl"


def test_an_earlier_demo_is_left_alone_unless_asked(tmp_path: Path) -> None:
    corpus(tmp_path)
    first = prepare(plan(tmp_path), fresh=False, report=quiet)
    (tmp_path / "volunteer-1").mkdir()
    (tmp_path / "volunteer-1" / "log").write_text("left the run\n")

    with pytest.raises(UserError, match=r"a demo that did not finish .*spes demo --dir \S+ --fresh"):
        prepare(plan(tmp_path), fresh=False, report=quiet)
    (tmp_path / "result.json").write_text(json.dumps({"rounds": 10, "peers": 4}))
    with pytest.raises(
        UserError, match=r"a finished demo of 10 rounds and 4 volunteers.*spes-replay show .*volunteer-1"
    ):
        prepare(plan(tmp_path), fresh=False, report=quiet)
    assert (tmp_path / "volunteer-1" / "log").exists()

    second = prepare(plan(tmp_path), fresh=True, report=quiet)
    assert second.organizer != first.organizer
    assert not (tmp_path / "volunteer-1").exists()
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "data" / "data.json").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_somebody_elses_directory_is_refused(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "volunteer-x").mkdir()
    with pytest.raises(UserError, match="holds volunteer-x, which is no demo's"):
        prepare(plan(tmp_path), fresh=fresh, report=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["volunteer-x"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "demo"
    path.write_text("")
    with pytest.raises(UserError, match="is a file; give the demo a directory"):
        prepare(plan(path), fresh=True, report=quiet)


def test_the_preset_has_room_for_all_peers() -> None:
    assert demo_setup.PEERS_MAX == 16
