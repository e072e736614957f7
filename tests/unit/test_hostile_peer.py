"""A whole peer without a network, under fire: handlers answer or give `RemoteError`, and no lie holds it up."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from spes_p2p.core.ladder import expected_sections
from spes_p2p.core.members import in_order
from spes_p2p.crypto.envelope import seal, unseal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.blobs import BlobRange
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.peer import Peer
from spes_p2p.peer.retention import Retention
from spes_p2p.peer.service import Service
from spes_protocols import control_pb2
from spes_protocols.codec import encode
from spes_protocols.errors import RemoteError
from spes_protocols.messages import Claim, End, Header, Presence, Prevote, Proposal, ProposedSet, Signed
from spes_protocols.requests import (
    CHAIN,
    CHAIN_BYTES_MAX,
    HELLO,
    INDEX,
    KNOWN_MAX,
    LEAVES,
    PUSH,
    ChainRequest,
    IndexRequest,
    Leaf,
    LeavesRequest,
)
from tests.unit.hostile_support import MemoryTransport
from tests.unit.log_support import ADA, BOB, EVE, ORGANIZER, RunLog, copy_log

CARL = Identity.from_seed(b"c" * 32)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    """A run of two owners, two rounds old."""
    made = RunLog(tmp_path_factory.mktemp("log"))
    made.start([made.claim(ADA), made.claim(BOB)])
    for _ in range(2):
        made.close_round([made.header(ADA), made.header(BOB)])
    return made


def serve(transport: MemoryTransport, log: RunLog) -> None:
    """Let a peer of the network have the whole run."""

    async def nothing(sender: str, request: bytes) -> bytes:
        raise RemoteError("busy", "")

    Service(
        transport, log.run.manifest.raw, log.chain, log.states, log.blobs,
        on_hello=nothing, on_push=nothing, claims=lambda: (),
    )  # fmt: skip


def make_peer(
    folder: Path,
    log: RunLog,
    transport: MemoryTransport,
    identity: Identity,
    said: list[str],
    role: str = "bootstrap",
) -> Peer:
    """A peer that has the log so far; as a bootstrap it follows the ledger alone."""
    options = PeerOptions(home=folder, role=role, trains=False)
    transport.daemon = SimpleNamespace(directory=folder)
    peer = Peer(options, identity, copy_log(log, folder), cast(LibP2P, transport), said.append)
    serve_peer(peer, transport)
    peer.ready = True
    return peer


def serve_peer(peer: Peer, transport: MemoryTransport) -> None:
    """What `Peer.run` registers."""
    Service(
        transport, peer.run_dir.manifest.raw, peer.chain, peer.states, peer.blobs,
        on_hello=peer.contacts.on_hello, on_push=peer._on_push,
        claims=lambda: [claim.raw for claim in peer.shell.participant.claims()],
    )  # fmt: skip


def with_peer(
    folder: Path,
    log: RunLog,
    test: Callable[[Peer, dict[str, MemoryTransport]], Awaitable[None]],
    said: list[str],
    role: str = "bootstrap",
) -> None:
    """Run a test with CARL's peer."""

    async def whole() -> None:
        network: dict[str, MemoryTransport] = {}
        peer = make_peer(folder, log, MemoryTransport(network, CARL), CARL, said, role)
        try:
            await test(peer, network)
        finally:
            await peer.close()

    asyncio.run(whole())


def presence(identity: Identity, log: RunLog, round: int) -> Signed[Presence]:
    """Its owner says that it has come to this round."""
    record = Presence(
        run_id=log.run.run_id,
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{identity.peer_id}",),
        role="volunteer",
        round=round,
        head=bytes(32),
        state_root=bytes(32),
        expires=int(time.time()) + 300,
    )
    return seal(record, identity)


# ---- who claims to be ahead -------------------------------------------------------------------------------------


def test_whoever_only_claims_to_be_ahead_holds_up_nothing(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def stall(sender: str, request: bytes) -> bytes:
            asked.set()
            await answer.wait()
            return b"\x91" * 1000 + b"\x90"

        liar = MemoryTransport(network, EVE)
        liar.handle(CHAIN, stall)
        transport = network[CARL.peer_id]
        await transport.receive(EVE.peer_id, HELLO, presence(EVE, log, 2**40).raw)
        catching_up = asyncio.create_task(peer.catching_up.run())
        await asked.wait()
        assert not peer.shell.advancing.locked(), "a commit of our own can be stored meanwhile"
        answer.set()
        await catching_up
        times = transport.calls.count((EVE.peer_id, CHAIN))
        for _ in range(5):
            await peer.catching_up.run()
        assert transport.calls.count((EVE.peer_id, CHAIN)) == times == 1

    with_peer(tmp_path, log, test, [])


def test_the_ledger_comes_from_whoever_has_it_among_liars(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        async def garbage(sender: str, request: bytes) -> bytes:
            return b"\xc1"

        log.close_round([log.header(ADA), log.header(BOB)])
        serve(MemoryTransport(network, ADA), log)
        transport = network[CARL.peer_id]
        await transport.receive(ADA.peer_id, HELLO, presence(ADA, log, 1).raw)
        for _ in range(12):
            liar = Identity.generate()
            MemoryTransport(network, liar).handle(CHAIN, garbage)
            await transport.receive(liar.peer_id, HELLO, presence(liar, log, 2**40).raw)
        await peer.catching_up.run()
        assert peer.chain.head.id == log.chain.head.id

    with_peer(tmp_path / "peer", log, test, [])


def test_a_reset_played_again_moves_no_peer(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])
    first = log.close_round([log.header(ADA), log.header(BOB)])
    reset = log.reset(first, in_order(first.after.members))
    second = log.close_round([log.header(ADA), log.header(BOB)])
    log.reset(second, in_order(second.after.members))

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        head, length = peer.chain.head, peer.chain.length
        with pytest.raises(RemoteError):
            await network[CARL.peer_id].receive(EVE.peer_id, PUSH, reset.data)
        assert (peer.chain.head, peer.chain.length) == (head, length)

    with_peer(tmp_path / "peer", log, test, [])


# ---- floods -----------------------------------------------------------------------------------------------------


def test_refused_records_of_strangers_fill_no_log_and_dial_nobody(tmp_path: Path, log: RunLog) -> None:
    said: list[str] = []

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        head, transport = peer.chain.head, network[CARL.peer_id]
        for _ in range(30):
            stranger = Identity.generate()
            claim = Claim(run_id=head.run_id, round=99, commit=head.id, state_root=head.state_root, wants=1)
            with pytest.raises(RemoteError):
                await transport.receive(EVE.peer_id, PUSH, seal(claim, stranger).raw)
            vote = Prevote(run_id=head.run_id, epoch=head.epoch, round=0, view=0, value=bytes(32))
            await transport.receive(EVE.peer_id, PUSH, seal(vote, stranger).raw)
        with pytest.raises(RemoteError):
            await transport.receive(EVE.peer_id, PUSH, seal(End(run_id=head.run_id, reason="\x1b[2J"), EVE).raw)
        await asyncio.gather(*peer._tasks)
        assert said == []
        assert transport.calls == []

    with_peer(tmp_path, log, test, said)


def test_a_flood_of_invented_signers_does_not_grow_a_peer(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        head = peer.chain.head
        for number in range(60):
            vote = Prevote(run_id=head.run_id, epoch=bytes(32), round=number, view=2**20, value=b"")
            raw = seal(vote, Identity.generate()).raw
            await network[CARL.peer_id].receive(EVE.peer_id, PUSH, raw)
        participant = peer.shell.participant
        assert len(participant._early) == len(participant.agreement._views) == len(peer.contacts._hello_sent) == 0

    with_peer(tmp_path, log, test, [])


def test_blobs_that_no_commit_names_do_not_stay(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB), log.claim(EVE, wants=0)])

    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        headers = [log.header(ADA), log.header(BOB)]
        late = log.header(EVE)
        again = seal(replace(late.record, sections=(replace(late.record.sections[0], blob=bytes(32)),)), EVE)
        serve(MemoryTransport(network, ADA), log)
        transport = network[CARL.peer_id]
        await transport.receive(ADA.peer_id, HELLO, presence(ADA, log, 0).raw)
        async with peer.shell.advancing:
            await peer.shell.moved(None)  # as when it has caught up
        for header in (*headers, late):
            await transport.receive(ADA.peer_id, PUSH, header.raw)
        await asyncio.gather(*peer.shell._round_tasks)
        peer.shell.leftovers.note([again.record.sections[0].blob])
        peer.blobs.partial(bytes(32)).write_bytes(b"withheld")
        assert peer.blobs.has(late.record.sections[0].blob)
        step = peer.chain.check("commit", log.close_round(headers).data)
        async with peer.shell.advancing:
            peer.chain.append(step)
            await peer.shell.moved(step)
        counted = {section.blob for header in headers for section in header.record.sections}
        assert {path.name for path in peer.blobs.directory.iterdir()} == {digest.hex() for digest in counted}

    with_peer(tmp_path / "peer", log, test, [], role="volunteer")


def test_a_blob_that_is_needed_again_outlives_its_first_round(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log")
    log.start([log.claim(ADA), log.claim(BOB)])
    ada, bob = log.header(ADA), log.header(BOB)
    for _ in range(4):
        head = log.chain.head
        place = {"round": head.round, "base": head.id, "state_root": head.state_root}
        log.close_round([seal(replace(ada.record, **place), ADA), seal(replace(bob.record, **place), BOB)])
    Retention(
        log.chain, log.states, log.blobs, PeerOptions(home=tmp_path, disk_bytes_max=0), log=lambda line: None
    ).tidy()
    assert all(log.blobs.has(section.blob) for section in (*ada.record.sections, *bob.record.sections))


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e300, -1.0])
def test_a_loss_that_is_none_is_published_as_a_high_one(tmp_path: Path, log: RunLog, loss: float) -> None:
    async def whole() -> None:
        peer = make_peer(tmp_path, log, MemoryTransport({}, ADA), ADA, [])
        try:
            done = control_pb2.RoundDone(
                round=peer.chain.head.round, epoch=peer.chain.head.epoch, tokens=10, steps=1, loss=loss
            )
            for name in ("shared", "group/0", "group/1"):
                if name in expected_sections(log.manifest, log.chain.head, ADA.peer_id):
                    section = log.section(name)
                    path = tmp_path / name.replace("/", "-")
                    path.write_bytes(log.blobs.path(section.blob).read_bytes())
                    done.sections.add(
                        name=name, codec=section.codec, path=str(path), digest=section.blob, size=section.size
                    )
            await peer.publisher.on_done(done)
            head = peer.chain.head
            raw = peer.db.own_header(head.epoch, head.round)
            assert raw is not None
            assert unseal(raw, Header).record.loss in (0, 10**12)
        finally:
            await peer.close()

    asyncio.run(whole())


def test_the_control_socket_is_for_its_owner_alone(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        await peer.control.start()
        assert stat.S_IMODE(peer.control.socket.stat().st_mode) == 0o600

    with_peer(tmp_path, log, test, [])


# ---- requests ---------------------------------------------------------------------------------------------------


def test_a_chain_request_does_not_read_more_than_it_sends(
    tmp_path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        read: list[int] = []
        commit = peer.chain.db.chain(1, 1)[0]

        def chain(first: int, count: int) -> list[tuple[str, bytes]]:
            read.append(count)
            return [commit] * count if first < 1000 else []

        monkeypatch.setattr(peer.chain.db, "chain", chain)
        monkeypatch.setattr("spes_p2p.peer.service.CHAIN_BYTES_MAX", 10 * len(commit[1]))
        raw = await network[CARL.peer_id].receive(EVE.peer_id, CHAIN, encode(ChainRequest(known=(bytes(32),))))
        assert len(raw) > len(commit[1])
        assert sum(read) <= 20

    assert CHAIN_BYTES_MAX > 0
    with_peer(tmp_path, log, test, [])


def test_only_agreed_states_are_served_and_no_index_is_parsed_for_it(tmp_path: Path, log: RunLog) -> None:
    async def test(peer: Peer, network: dict[str, MemoryTransport]) -> None:
        transport = network[CARL.peer_id]
        index = await transport.receive(EVE.peer_id, INDEX, encode(IndexRequest(round=2)))
        assert index == peer.states.index_path(2).read_bytes()
        beyond = peer.chain.head.round + 1
        peer.states.index_path(beyond).write_bytes(index)
        peer.states.path(beyond).write_bytes(peer.states.path(2).read_bytes())
        with pytest.raises(RemoteError):
            await transport.receive(EVE.peer_id, INDEX, encode(IndexRequest(round=beyond)))
        request = encode(LeavesRequest(round=beyond, leaves=(Leaf(tensor=0, leaf=0),)))
        with pytest.raises(RemoteError):
            [chunk async for chunk in transport._stream_handlers[LEAVES](EVE.peer_id, request)]

    with_peer(tmp_path, log, test, [])


# ---- anything at all --------------------------------------------------------------------------------------------


def samples(log: RunLog) -> list[bytes]:
    """Valid records and requests of every kind, as a start for damage."""
    head = log.chain.head
    header = log.header(ADA)
    value = ProposedSet(run_id=head.run_id, epoch=head.epoch, round=head.round, parent=head.id, headers=(header.raw,))
    vote = Prevote(run_id=head.run_id, epoch=head.epoch, round=head.round, view=0, value=bytes(32))
    proposal = Proposal(view=0, valid_view=-1, value=value)
    leader = next(identity for identity in (ADA, BOB) if identity.peer_id == head.electorate.leader(0))
    return [
        header.raw,
        seal(vote, ADA).raw,
        seal(replace(vote, view=2**20), BOB).raw,
        seal(proposal, leader).raw,
        seal(replace(proposal, value=replace(value, headers=(b"\x80",))), leader).raw,
        seal(replace(proposal, polc=(seal(vote, ADA).raw,) * 2), leader).raw,
        log.claim(EVE).raw,
        log.release(ADA).raw,
        seal(End(run_id=head.run_id), ORGANIZER).raw,
        *(data for _, data in log.db.chain(0, 10)),
        presence(EVE, log, 2**53).raw,
        encode(ChainRequest(known=(bytes(32),) * KNOWN_MAX)),
        encode(IndexRequest(round=2**53)),
        encode(LeavesRequest(round=2, leaves=(Leaf(tensor=2**20, leaf=2**20),))),
        encode(LeavesRequest(round=2**53, leaves=(Leaf(tensor=0, leaf=0),))),
        encode(BlobRange(blob=header.record.sections[0].blob, offset=2**53, length=1)),
        b"",
    ]


async def shoot(transport: MemoryTransport, raw: bytes) -> None:
    """Bytes at every handler: an answer or a `RemoteError`, nothing else."""
    for handler in transport._handlers.values():
        with contextlib.suppress(RemoteError):
            await handler(EVE.peer_id, raw)
    for stream in cast(dict[str, Any], transport._stream_handlers).values():
        with contextlib.suppress(RemoteError):
            async for chunk in stream(EVE.peer_id, raw):
                assert chunk


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, log: RunLog) -> tuple[Callable[[bytes], None], list[bytes]]:
    """A function that shoots bytes at one standing peer, and valid samples."""
    loop = asyncio.new_event_loop()
    network: dict[str, MemoryTransport] = {}

    async def up() -> Peer:
        folder = tmp_path_factory.mktemp("target")
        return make_peer(folder, log, MemoryTransport(network, CARL), CARL, [])

    peer = loop.run_until_complete(up())
    shots = samples(log)

    def fire(raw: bytes) -> None:
        loop.run_until_complete(shoot(network[CARL.peer_id], raw))
        failed = [task for task in (*peer._tasks, *peer.shell._tasks) if task.done() and task.exception()]
        assert failed == []

    return fire, shots


def test_every_sample_at_every_handler(target: tuple[Callable[[bytes], None], list[bytes]]) -> None:
    fire, shots = target
    for shot in shots:
        fire(shot)


@example_settings(max_examples=200)
@given(data=st.data())
def test_damaged_records_and_noise_at_every_handler(
    target: tuple[Callable[[bytes], None], list[bytes]], data: st.DataObject
) -> None:
    fire, shots = target
    raw = bytearray(data.draw(st.sampled_from(shots) | st.binary(max_size=64)))
    for _ in range(data.draw(st.integers(0, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    fire(bytes(raw[: len(raw) - data.draw(st.integers(0, 2))]))
