"""A run whose first state does not follow from its seed: signed by its root, served, fetched, verified (SPEC 6.7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.crypto.envelope import unseal_manifest
from spes_p2p.delta.genesis import genesis_root, genesis_tensors
from spes_p2p.peer import joining, service
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.retention import Retention
from spes_p2p.replay.verify import Verifier
from spes_p2p.store import first_state
from spes_p2p.store.blobs import BlobStore
from spes_p2p.store.first_state import adopt_state, state_index, write_state
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.states import StateStore
from spes_protocols.codec import decode
from spes_protocols.errors import NetworkError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.requests import SNAPSHOTS, SnapshotsReply
from tests.net.helpers import Net, net_test
from tests.unit.cli_support import Spes, complete, write_toml
from tests.unit.hostile_support import MemoryTransport
from tests.unit.join_support import Holder, Newcomer, serve_log_blobs
from tests.unit.log_support import ADA, BOB, MODEL, ORGANIZER, RunLog, flip_file, make_manifest
from tests.unit.test_replay_fetch import download, problems, serve

FIRST_SEED = 99
ROUNDS = 3


def snapshot_manifest(folder: Path) -> Manifest:
    """A run that begins with the weights of another seed than its own, as if somebody had made them."""
    folder.mkdir(parents=True, exist_ok=True)
    root = genesis_root(MODEL, 2, FIRST_SEED)
    return replace(make_manifest(folder), genesis="snapshot", genesis_root=root)


def play(folder: Path) -> RunLog:
    log = RunLog(folder, manifest=snapshot_manifest(folder), first_seed=FIRST_SEED)
    log.start([log.claim(ADA), log.claim(BOB)])
    for _ in range(ROUNDS):
        log.close_round([log.header(ADA), log.header(BOB)])
    return log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    return play(tmp_path_factory.mktemp("log"))


# ---- the file -----------------------------------------------------------------------------------------------------


def write_file(path: Path, seed: int = FIRST_SEED) -> bytes:
    specs = [(name, array.shape) for name, array in genesis_tensors(MODEL, 2, seed)]
    return write_state(path, specs, genesis_tensors(MODEL, 2, seed))


def test_a_state_file_has_the_root_of_its_tensors_and_becomes_snapshot_0(tmp_path: Path, log: RunLog) -> None:
    path = tmp_path / "run.genesis.safetensors"
    assert write_file(path) == log.manifest.genesis_root
    specs = log.run.specs()
    shares: list[float] = []
    assert state_index(path, specs, shares.append) == log.states.index(0)
    assert shares[-1] == 1.0 and shares == sorted(shares)
    store = StateStore(tmp_path / "states", specs)
    adopt_state(store, specs, path, log.manifest.genesis_root)
    path.unlink()
    assert store.verify(0) == log.manifest.genesis_root
    assert [entry.name for entry in tmp_path.iterdir()] == ["states"]


def test_on_another_disk_the_file_is_copied(tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    path = tmp_path / "state"
    write_file(path)
    monkeypatch.setattr(first_state.os, "link", refuse)
    store = StateStore(tmp_path / "states", log.run.specs())
    adopt_state(store, log.run.specs(), path, log.manifest.genesis_root)
    assert store.verify(0) == log.manifest.genesis_root


def test_files_that_are_not_this_state(tmp_path: Path, log: RunLog) -> None:
    path, specs = tmp_path / "state", log.run.specs()
    store = StateStore(tmp_path / "states", specs)
    with pytest.raises(UserError, match=r"cannot read the first state .*: No such file"):
        state_index(path, specs)
    path.write_bytes(b"what is this")
    with pytest.raises(UserError, match="not a state of this manifest's model: 12 bytes where"):
        state_index(path, specs)
    write_file(path, seed=1)
    with pytest.raises(UserError, match="give the file that `spes run sign` read with --genesis FILE"):
        adopt_state(store, specs, path, log.manifest.genesis_root)
    assert store.rounds() == []
    with pytest.raises(UserError, match="no directory"):
        write_file(tmp_path / "missing" / "state")


# ---- signing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    ORGANIZER.save(tmp_path / "organizer.key")
    return Spes(capsys)


def test_signing_takes_the_root_from_the_file(spes: Spes, tmp_path: Path) -> None:
    plain = complete(tmp_path) | {"genesis": "snapshot"}
    plain["model"] = {**plain["model"], "num_experts": 4, "sequence_length": 16, "num_attention_heads": 2}
    plain["ownership"] = {"groups": 2, "min_peers": 2}
    plain["merging"] = {}
    write_toml(tmp_path, plain)
    sign = ("run", "sign", "run.toml", "--key", "organizer.key")
    result = spes(*sign)
    assert (result.code, "cannot read the first state run.genesis.safetensors" in result.error) == (2, True)

    root = write_file(tmp_path / "run.genesis.safetensors")
    assert spes(*sign).code == 0
    record = unseal_manifest((tmp_path / "run.spes").read_bytes()).record
    assert (record.genesis, record.genesis_root) == ("snapshot", root)

    write_file(tmp_path / "other", seed=1)
    write_toml(tmp_path, plain | {"genesis_root": root.hex()})
    result = spes(*sign, "--genesis", "other", "--force")
    assert result.code == 2 and "genesis_root is not the root of other" in result.error
    write_toml(tmp_path, plain | {"genesis": "seed"})
    result = spes(*sign, "--genesis", "other", "--force")
    assert result.code == 2 and "leave out --genesis" in result.error


# ---- peers --------------------------------------------------------------------------------------------------------


class Swarm:
    """A holder of states, one of blobs, and CARL."""

    def __init__(self, log: RunLog, folder: Path) -> None:
        self.network: dict[str, MemoryTransport] = {}
        self.holder = Holder(self.network, 0, log.states)
        serve_log_blobs(self.network, 1, log.blobs)
        self.newcomer = Newcomer(log, folder, self.network)

    def come_up(self) -> None:
        asyncio.run(asyncio.wait_for(self.newcomer.syncer.state(), 60))


def test_a_newcomer_fetches_the_first_state_and_goes_forward_from_it(log: RunLog, tmp_path: Path) -> None:
    swarm = Swarm(log, tmp_path)
    swarm.holder.rounds = (0,)
    swarm.come_up()
    assert swarm.newcomer.worker.applied == list(range(ROUNDS))  # and -1, S_0, was not computed
    assert swarm.newcomer.states.verify(ROUNDS) == log.chain.head.state_root
    assert swarm.newcomer.states.verify(0) == log.manifest.genesis_root


def test_before_the_first_round_the_first_state_is_all_that_is_fetched(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log", manifest=snapshot_manifest(tmp_path / "log"), first_seed=FIRST_SEED)
    swarm = Swarm(log, tmp_path)
    swarm.holder.rounds = ()
    with pytest.raises(NetworkError, match="no peer serves a snapshot of round 0"):
        swarm.come_up()
    swarm.holder.rounds = None
    swarm.come_up()
    assert swarm.newcomer.states.verify(0) == log.manifest.genesis_root
    assert swarm.newcomer.worker.applied == []
    log.close()


def test_a_holder_with_another_first_state_is_not_believed(log: RunLog, tmp_path: Path) -> None:
    liar = StateStore(tmp_path / "liar", log.run.specs())
    with liar.writer(0) as writer:
        for name, array in genesis_tensors(MODEL, 2, log.manifest.seed):
            writer.add(name, array)
        writer.commit()
    network: dict[str, MemoryTransport] = {}
    Holder(network, 0, liar)
    newcomer = Newcomer(log, tmp_path, network)
    with pytest.raises(NetworkError):
        asyncio.run(asyncio.wait_for(newcomer.syncer.state(), 60))
    assert newcomer.states.rounds() == []


def test_a_bootstrap_that_holds_nothing_else_is_asked_for_it(log: RunLog, tmp_path: Path) -> None:
    swarm = Swarm(log, tmp_path)
    swarm.holder.rounds = (0,)
    contacts = swarm.newcomer.syncer._contacts
    everybody = contacts.volunteers()
    contacts.fresh = lambda: everybody  # type: ignore[method-assign]
    contacts.volunteers = list  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(swarm.newcomer.syncer.snapshot_at(0), 60))
    assert swarm.newcomer.states.verify(0) == log.manifest.genesis_root
    with pytest.raises(NetworkError, match="no peer serves a snapshot of round 3"):
        asyncio.run(asyncio.wait_for(swarm.newcomer.syncer.snapshot_at(3), 60))


def test_of_too_many_states_the_first_and_the_newest_are_offered(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(sender: str, raw: bytes) -> bytes:
        raise AssertionError("nothing is pushed here")

    monkeypatch.setattr(service, "SNAPSHOTS_MAX", 2)
    network: dict[str, MemoryTransport] = {}
    transport = MemoryTransport(network, ADA)
    service.Service(
        transport, log.run.manifest.raw, log.chain, log.states, log.run.blobs(),
        on_hello=nobody, on_push=nobody, claims=lambda: (),
    )  # fmt: skip
    asker = MemoryTransport(network, BOB)
    raw = asyncio.run(asker.call(ADA.peer_id, SNAPSHOTS, b"", timeout_seconds=5))
    assert decode(SnapshotsReply, raw).rounds == (0, ROUNDS)


def test_a_bootstrap_gives_the_file_beside_its_manifest(log: RunLog, tmp_path: Path) -> None:
    said: list[str] = []
    raw = log.run.manifest.raw
    run = RunDir.create(tmp_path / "home", raw)
    joining.give_first_state(run, tmp_path / "run.spes", None, said.append)
    assert run.states().rounds() == [] and said == []  # others have it
    write_file(tmp_path / "run.genesis.safetensors")
    joining.give_first_state(run, tmp_path / "run.spes", None, said.append)
    assert run.states().verify(0) == log.manifest.genesis_root
    joining.give_first_state(run, None, tmp_path / "nothing", said.append)  # it has it: the file is not read again
    assert len(said) == 1
    other = RunLog(tmp_path / "seeded")
    with pytest.raises(UserError, match="follows from its seed: leave out --genesis"):
        joining.give_first_state(other.run, None, tmp_path / "run.genesis.safetensors", said.append)
    other.close()


def test_an_archive_never_lets_its_first_state_go(log: RunLog, tmp_path: Path) -> None:
    for role, kept in (("archive", [0, ROUNDS - 1, ROUNDS]), ("volunteer", [ROUNDS - 1, ROUNDS])):
        states = StateStore(tmp_path / role, log.run.specs())
        for number in range(ROUNDS + 1):
            with states.writer(number) as writer:
                for name, array in log.states.read(number).items():
                    writer.add(name, array)
                writer.commit()
        options = PeerOptions(home=tmp_path, disk_bytes_max=1, role=role, snapshot_rounds=1)
        blobs = BlobStore(tmp_path / "blobs")
        Retention(log.chain, states, blobs, options, log=lambda line: None).tidy()
        assert states.rounds() == kept


# ---- the log ------------------------------------------------------------------------------------------------------


def found(log: RunLog, **options: int) -> list[str]:
    return [str(problem) for problem in Verifier(log.run, **options).problems()]  # type: ignore[arg-type]


def test_a_log_is_verified_from_its_first_state(tmp_path: Path) -> None:
    log = play(tmp_path)
    log.close()
    assert found(log) == []
    assert found(log, from_snapshot=2) == []
    flip_file(log.states.path(0), -3)
    (problem, *_) = found(log)
    assert "leaf_digest" in problem and "0.safetensors" in problem
    log.states.remove(0)
    assert "begins from a state that the log lacks: get it with spes-replay fetch" in found(log)[0]


@net_test
async def test_a_fetched_log_has_its_first_state(net: Net) -> None:
    log, node = play(net.folder / "log"), await net.node()
    log.close()
    await serve(node, log.run)
    home = net.folder / "fetched"
    result = await download(home, f"{await node.address()}#{log.run.run_id.hex()}")
    assert (result.snapshot, problems(home)) == (ROUNDS, [])
    run = RunDir.open(result.dir)
    assert run.states().rounds() == [0, ROUNDS]
    assert np.array_equal(run.states().read(0)["lm_head.weight"], log.states.read(0)["lm_head.weight"])
