"""`spes-replay fetch` from real peers on loopback that serve a log as a volunteer does."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from spes_client.replay import main
from spes_client.replay_fetch import Fetched, fetch
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.service import Service
from spes_p2p.replay.fetch import wanted_blobs
from spes_p2p.replay.log import Log
from spes_p2p.replay.taken_back import taken_back
from spes_p2p.replay.verify import Verifier
from spes_p2p.store.chain import Chain
from spes_p2p.store.rundir import RunDir, resolve_run_dir
from spes_protocols.errors import UserError
from spes_protocols.manifest import Ownership
from spes_protocols.messages import Presence
from tests.net.helpers import Net, Node, net_test
from tests.unit.log_support import ADA, BOB, EVE, RunLog, copy_log, play, records


async def serve(node: Node, run: RunDir) -> None:
    """Answer as the peer whose log this is; the ledger stays open as long as the process."""
    chain = Chain(run.manifest.record, run.run_id, run.ledger())

    async def presence() -> Presence:
        return Presence(
            run_id=run.run_id,
            addresses=tuple(await node.transport.addresses()),
            role="archive",
            round=chain.head.round,
            head=chain.head.id,
            state_root=chain.head.state_root,
            expires=int(time.time()) + 60,
        )

    async def push(sender: str, raw: bytes) -> bytes:
        return b""

    contacts = Contacts(
        node.transport, node.identity, run.run_id, describe=presence, on_presence=lambda signed: None
    )  # fmt: skip
    states, blobs = run.states(), run.blobs()
    Service(
        node.transport, run.manifest.raw, chain, states, blobs,
        on_hello=contacts.on_hello, on_push=push, claims=lambda: (),
    )  # fmt: skip


def log_of(folder: Path) -> RunLog:
    log = play(folder / "log")
    log.close()
    return log


async def download(home: Path, *addresses: str) -> Fetched:
    return await fetch(home, addresses, lambda line: None, lambda what, share: None)


def problems(home: Path, **options: int) -> list[str]:
    return [str(problem) for problem in Verifier(resolve_run_dir(home), **options).problems()]  # type: ignore[arg-type]


@net_test
async def test_a_fetched_log_is_whole_and_verifies(net: Net) -> None:
    log, node = log_of(net.folder), await net.node()
    await serve(node, log.run)
    home = net.folder / "fetched"
    address = f"{await node.address()}#{log.run.run_id.hex()}"
    result = await download(home, address)
    wanted = len(log.blobs.digests()) - 2
    assert (result.rounds, result.blobs, result.fetched, result.missing) == (5, wanted, wanted, ())
    assert result.snapshot == 5
    assert result.next_command == f"spes-replay verify {result.dir}"
    assert problems(home) == []
    again = await download(home, address)
    assert (again.fetched, again.blobs) == (0, wanted)
    assert not list(home.rglob("*.partial"))


@net_test
async def test_what_is_there_is_kept_and_the_rest_resumed(net: Net) -> None:
    log, node = log_of(net.folder), await net.node()
    await serve(node, log.run)
    home = net.folder / "fetched"
    result = await download(home, await node.address())
    run = resolve_run_dir(home)
    digests = run.blobs().digests()
    os.rename(run.blobs().path(digests[0]), run.blobs().partial(digests[0]))
    os.truncate(run.blobs().partial(digests[0]), 1000)
    run.blobs().remove(digests[1])
    before = node.transport.bytes_up
    again = await download(result.dir, await node.address())
    assert (again.dir, again.fetched) == (run.path, 2)
    sizes = [run.blobs().size(digest) or 0 for digest in digests[:2]]
    assert problems(home) == []
    assert node.transport.bytes_up - before < sum(sizes) + 6000


@net_test
async def test_a_blob_that_nobody_has_is_reported_and_another_peer_is_asked(net: Net) -> None:
    """Two peers keep different halves; one blob is with neither."""
    log = log_of(net.folder)
    first, second = await net.pair()
    halves = [copy_log(log, net.folder / name) for name in ("first", "second")]
    digests = halves[0].blobs().digests()
    for number, digest in enumerate(digests):
        halves[number % 2].blobs().remove(digest)
    for node, run in zip((first, second), halves, strict=True):
        await serve(node, run)
    lost = next(iter(_round_zero_blobs(log)))
    for run in halves:
        run.blobs().remove(lost)
    home = net.folder / "fetched"
    result = await download(home, await first.address(), await second.address())
    assert [(m.round, m.blob, m.refused) for m in result.missing] == [(0, lost, False)]
    assert "not_held" in result.missing[0].reason
    assert result.next_command.endswith(" --from-snapshot 5")
    assert problems(home, from_snapshot=5) == []
    (problem,) = problems(home)[:1]
    assert "the file is missing" in problem


def _round_zero_blobs(log: RunLog) -> list[bytes]:
    with log.run.ledger() as db:
        return [w.section.blob for w in wanted_blobs(Log(log.manifest, log.run.run_id, db)) if w.round == 0]


@net_test
async def test_another_run_is_refused(net: Net) -> None:
    log, node = log_of(net.folder), await net.node()
    await serve(node, log.run)
    with pytest.raises(UserError, match="check the address"):
        await download(net.folder / "fetched", f"{await node.address()}#{'ab' * 32}")
    assert not (net.folder / "fetched" / "runs").exists()
    other = RunLog(net.folder / "other", seed=6)
    other.close()
    with pytest.raises(UserError, match="is in run"):
        await download(other.run.path, await node.address())


def forks(folder: Path) -> tuple[RunLog, RunLog]:
    """Two logs of one run: after round 0 ADA went on alone for three rounds, without her BOB and EVE for two."""
    log = RunLog(folder / "alone", ownership=Ownership(groups=4, min_peers=3))
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE)])
    log.close_round([log.header(ADA), log.header(BOB), log.header(EVE)], voters=[ADA, BOB, EVE])
    other = log.fork(folder / "majority")
    log.close_with(ADA)
    for _ in range(2):
        log.close_round([log.header(ADA)], voters=[ADA])
    other.close_with(BOB, EVE)
    other.close_round([other.header(BOB), other.header(EVE)], voters=[BOB, EVE])
    for each in (log, other):
        each.close()
    return log, other


@net_test
async def test_of_two_branches_the_better_one_is_fetched(net: Net) -> None:
    """Whoever is asked first, and although the other branch is longer."""
    alone, majority = forks(net.folder)
    nodes = await net.pair()
    for node, log in zip(nodes, (alone, majority), strict=True):
        await serve(node, log.run)
    addresses = [await node.address() for node in nodes]
    for name, order, lost in (("first", addresses, 3), ("second", addresses[::-1], 0)):
        result = await download(net.folder / name, *order)
        assert (result.rounds, result.taken_back, result.missing, result.snapshot) == (3, lost, (), 3)
        assert ledger_of(result.dir) == ledger_of(majority.run.path)
        assert problems(net.folder / name) == []
        assert len(taken_back(resolve_run_dir(net.folder / name))) == lost


@net_test
async def test_a_log_whose_branch_has_lost_is_rolled_back(net: Net) -> None:
    alone, majority = forks(net.folder)
    first, second = await net.pair()
    await serve(first, alone.run)
    await serve(second, majority.run)
    home = net.folder / "fetched"
    before = await download(home, await first.address())
    run = resolve_run_dir(home)
    assert (before.rounds, before.taken_back, run.states().rounds()) == (4, 0, [4])
    blobs = set(run.blobs().digests())
    said: list[str] = []
    after = await fetch(home, [await second.address()], said.append, lambda what, share: None)
    assert (after.rounds, after.taken_back, after.snapshot, after.missing) == (3, 3, 3, ())
    assert f"the ledger of {second.peer_id} goes before what was here: 3 records taken back" in said
    assert run.states().rounds() == [3]
    assert blobs < set(run.blobs().digests())
    assert problems(home) == []
    assert [(r.round, r.strength, r.checked) for r in taken_back(run)] == [
        (1, "any", True),
        (2, "final", True),
        (3, "final", True),
    ]
    again = await download(home, await first.address())
    assert (again.rounds, again.taken_back, ledger_of(run.path)) == (3, 0, ledger_of(majority.run.path))


def ledger_of(path: Path) -> list[tuple[str, bytes]]:
    return records(RunDir.open(path))


def test_errors_of_the_network_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = RunLog(tmp_path / "log").run.manifest.signer
    for address, code, says in (
        (f"/ip4/127.0.0.1/tcp/9/p2p/{peer}", 3, "cannot reach /ip4/127.0.0.1/tcp/9"),
        ("nonsense", 2, "is not a peer's address"),
    ):
        assert main(["fetch", str(tmp_path / "home"), "--peer", address]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert says in captured.err
    assert not (tmp_path / "home").exists()


def test_the_command_fetches_from_the_address_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of(tmp_path)

    async def run() -> int:
        net = Net(tmp_path)
        try:
            node = await net.node()
            await serve(node, log.run)
            address = await node.address()
            return await asyncio.to_thread(main, ["fetch", "--peer", address, str(tmp_path / "fetched")])
        finally:
            await net.close()

    assert asyncio.run(run()) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert ": 5 rounds, 23 blobs (23 of them new, 0 missing), the state of round 5" in lines[0]
    assert lines[1].startswith("verify it with: spes-replay verify ")
    assert "run 'by hand'" in captured.err
