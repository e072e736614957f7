"""What an organizer says to a run: start, reset, ban, end, each a signed record handed to its peers (SPEC 5.10).

Each function joins for a moment under the organizer's key, without a home directory: it reads the ledger, makes the
record, pushes it to everybody it can reach, and is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_p2p.core.head import Head
from spes_p2p.core.ledger import CLAIMS_MAX, check_claim_place, start_record
from spes_p2p.core.members import reset_members
from spes_p2p.crypto.envelope import seal, unseal, unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.net import timeouts
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.net.transport import Transport
from spes_p2p.peer import joining
from spes_p2p.peer.ledger_sync import LedgerReader
from spes_p2p.peer.status import counted
from spes_p2p.store.chain import Chain
from spes_p2p.store.ledger_db import LedgerDB
from spes_protocols.codec import decode
from spes_protocols.errors import NetworkError, RemoteError, UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import Ban, Claim, End, Presence, Reset, Signed, Start
from spes_protocols.requests import (
    CLAIMS,
    HELLO,
    MANIFEST,
    PUSH,
    SNAPSHOTS,
    ClaimsReply,
    HelloReply,
    SnapshotsReply,
)

CALL_SECONDS = timeouts.CALL
STATES_NAMED = 8


@dataclass(frozen=True)
class _Visit:
    """A short stay in a run: its ledger, the peers that answer, the claims they have seen."""

    manifest: Manifest
    identity: Identity
    chain: Chain
    transport: LibP2P
    peers: tuple[str, ...]

    @property
    def head(self) -> Head:
        return self.chain.head

    async def push(self, record: Start | Reset | Ban | End) -> str:
        """Sign a record and hand it to every peer. Raises `UserError` if none takes it."""
        raw = seal(record, self.identity).raw
        problems: list[str] = []

        async def hand(peer: str) -> bool:
            try:
                await self.transport.call(peer, PUSH, raw, timeout_seconds=CALL_SECONDS)
            except (NetworkError, RemoteError) as error:
                problems.append(str(error))
                return False
            return True

        taken = sum(await asyncio.gather(*(hand(peer) for peer in self.peers)))
        if not taken:
            raise UserError(f"no peer took the record: {'; '.join(problems)}")
        return f"{taken} of {len(self.peers)} peers took it"


async def run_start(raw: bytes, identity: Identity, peers: Sequence[str]) -> str:
    """Open the run with the claims its peers have seen. Raises `UserError` if they are too few."""
    async with _visit(raw, identity, peers) as visit:
        head, wanted = visit.head, visit.manifest.ownership.min_peers
        if any(m.groups for m in head.members):
            raise UserError(f"the run is under way (round {head.round}); only `spes run reset` may replace its owners")
        claims = await _claims(visit)
        owners = [claim for claim in claims if claim.record.wants]
        if len(owners) < wanted:
            raise UserError(f"{len(owners)} peers have claimed groups, the manifest wants {wanted}; try again later")
        # Of a flood, so many by chance as a record holds; the others stand in the commits that follow.
        chosen = random.sample(owners, min(len(owners), max(CLAIMS_MAX, wanted)))
        start = start_record(visit.manifest, head, chosen)
        owning = counted(sum(bool(m.groups) for m in start.members), "owner")
        return f"run started with {owning}; {await visit.push(start)}"


async def run_reset(raw: bytes, identity: Identity, peers: Sequence[str], *, commit: bytes | None, reason: str) -> str:
    """Go on from `commit`, or where the ledger stands, with the members of its table who answer.

    The groups of the others go to those who want more, claimants included. Raises `UserError` if the ledger lacks the
    commit, or if nobody would own anything.
    """
    async with _visit(raw, identity, peers) as visit:
        heads = {step.after.id: step.after for step in visit.chain.walk()}
        if not heads:
            raise UserError("the run has not begun; start it with: spes run start")
        before = heads.get(commit or visit.head.id)
        if before is None:
            raise UserError(f"commit {(commit or b'').hex()[:16]} is not in the ledger these peers serve")
        claims = [claim for claim in await _claims(visit) if claim.signer not in before.banned]
        answering = await _answering(visit, [*(m.peer for m in before.members), *(c.signer for c in claims)])
        present = [m for m in before.members if m.peer in answering]
        claims = [claim for claim in claims if claim.signer in answering][:CLAIMS_MAX]
        members = reset_members(visit.manifest, present, claims, before.id, before.round)
        nobody = not any(m.groups for m in members)
        if nobody and not visit.head.ended:  # after an end nobody stays to answer: those who come may then start it
            raise UserError(
                f"none of the {counted(len(before.members), 'member')} of round {before.round} answers, and nobody "
                "else has claimed groups; let volunteers join, and try again in a moment"
            )
        reset = Reset(
            run_id=before.run_id,
            number=visit.head.resets + 1,
            parent=before.id,
            round=before.round,
            state_root=before.state_root,
            members=members,
            reason=reason,
        )
        taken = await visit.push(reset)
        whom = f"{counted(len(members), 'member')}, {counted(sum(bool(m.groups) for m in members), 'owner')}"
        then = "; volunteers may join now, and `spes run start` goes on" if nobody else ""
        states = await _states(visit)
        if before.round and before.round not in states:
            held = ", ".join(map(str, sorted(states)[-STATES_NAMED:])) or "none"
            then += f"; no peer here has the state of round {before.round} (held: {held}), it has to be computed again"
        return f"reset {reset.number}: the run goes on from round {before.round} with {whom}; {taken}{then}"


async def run_ban(raw: bytes, identity: Identity, peers: Sequence[str], *, peer: str, reason: str) -> str:
    """Ban a peer from the next commit on."""
    async with _visit(raw, identity, peers) as visit:
        return f"{peer} is banned with the next commit; {await visit.push(_ban(visit, peer, reason))}"


async def run_end(raw: bytes, identity: Identity, peers: Sequence[str], *, reason: str) -> str:
    """End the run with the next commit."""
    async with _visit(raw, identity, peers) as visit:
        end = End(run_id=visit.head.run_id, resets=visit.head.resets, reason=reason)
        return f"the run ends with the next commit; {await visit.push(end)}"


def _ban(visit: _Visit, peer: str, reason: str) -> Ban:
    if peer in visit.head.banned:
        raise UserError(f"{peer} is banned already")
    return Ban(run_id=visit.head.run_id, resets=visit.head.resets, peer=peer, reason=reason)


@contextlib.asynccontextmanager
async def _visit(raw: bytes, identity: Identity, addresses: Sequence[str]) -> AsyncIterator[_Visit]:
    manifest = unseal_manifest(raw)
    run_id = joining.run_id_of(manifest)
    if identity.peer_id not in (*manifest.record.organizer.keys, *manifest.record.organizer.start_keys):
        raise UserError(f"the key {identity.peer_id} is none that the manifest of {manifest.record.name!r} names")
    if joining.expected_run(addresses) not in (None, run_id):
        raise UserError("the addresses are of another run than the manifest")
    with tempfile.TemporaryDirectory(prefix="spes-organizer-") as name:
        # A network identity of its own: the organizer's key may be in use by a bootstrap at the same time.
        directory = Path(name)
        visitor = Identity.generate()
        visitor.save(directory / "identity")
        transport = await LibP2P.create(
            identity_path=directory / "identity",
            peer_id=visitor.peer_id,
            listen=("/ip4/0.0.0.0/tcp/0",),
            log_path=directory / "p2pd.log",
        )
        transport.handle(PUSH, _ignore)  # a visitor hears what members hear, and has no use for it
        try:
            reached = await joining.connect_any(transport, addresses)
            with LedgerDB(directory / "ledger.sqlite") as db:
                chain = Chain(manifest.record, run_id, db)
                everybody = await _read(chain, transport, visitor, reached)
                yield _Visit(manifest.record, identity, chain, transport, tuple(everybody))
        finally:
            await transport.close()


async def _ignore(sender: str, request: bytes) -> bytes:
    return b""


async def _read(chain: Chain, transport: Transport, visitor: Identity, reached: Sequence[str]) -> list[str]:
    """Read the ledger from those reached, and learn from them who else is there."""
    own = Presence(
        run_id=chain.run_id,
        addresses=(),
        role="volunteer",
        round=0,
        head=b"",
        state_root=b"",
        expires=int(time.time()) + 60,
    )
    ledger = LedgerReader(transport, chain, report=lambda what, share: None)
    known: dict[str, tuple[str, ...]] = {}
    problems = []
    for peer in reached:
        try:
            there = await _who_is_there(chain, transport, seal(own, visitor).raw, peer)
            await ledger.read(peer)
            known.update(there)
        except (NetworkError, RemoteError) as error:  # one that lies or is silent is not in the organizer's way
            problems.append(f"{peer}: {error}")
    if not known:
        raise NetworkError("; ".join(problems))
    for peer, addresses in known.items():
        transport.add_address(peer, list(addresses))
    return list(known)


async def _who_is_there(chain: Chain, transport: Transport, hello: bytes, peer: str) -> dict[str, tuple[str, ...]]:
    """The peers of the run that one of them knows, itself among them, with their addresses."""
    reply = decode(HelloReply, await transport.call(peer, HELLO, hello, timeout_seconds=CALL_SECONDS), peer=peer)
    presences = [unseal(envelope, Presence, peer=peer) for envelope in reply.presences]
    return {p.signer: p.record.addresses for p in presences if p.record.run_id == chain.run_id}


async def _answering(visit: _Visit, peers: Sequence[str]) -> set[str]:
    """Those of the peers that are there now: others may know one that has just died."""

    async def answers(peer: str) -> bool:
        try:
            await visit.transport.call(peer, MANIFEST, b"", timeout_seconds=CALL_SECONDS)
        except (NetworkError, RemoteError):
            return False
        return True

    there = await asyncio.gather(*(answers(peer) for peer in peers))
    return {peer for peer, is_there in zip(peers, there, strict=True) if is_there}


async def _states(visit: _Visit) -> set[int]:
    """The rounds whose states somebody here serves."""

    async def ask(peer: str) -> Sequence[int]:
        with contextlib.suppress(NetworkError, RemoteError):
            answer = await visit.transport.call(peer, SNAPSHOTS, b"", timeout_seconds=CALL_SECONDS)
            return decode(SnapshotsReply, answer, peer=peer).rounds
        return ()

    return set(itertools.chain.from_iterable(await asyncio.gather(*(ask(peer) for peer in visit.peers))))


async def _claims(visit: _Visit) -> list[Signed[Claim]]:
    """The valid claims that any of the peers has seen, one per claimant, in ascending order of peer id."""

    async def ask(peer: str) -> Sequence[Any]:
        with contextlib.suppress(NetworkError, RemoteError):
            answer = await visit.transport.call(peer, CLAIMS, b"", timeout_seconds=CALL_SECONDS)
            return decode(ClaimsReply, answer, peer=peer).claims
        return ()

    found: dict[str, Signed[Claim]] = {}
    for envelopes in await asyncio.gather(*(ask(peer) for peer in visit.peers)):
        for envelope in envelopes:
            with contextlib.suppress(RemoteError):
                claim = unseal(envelope, Claim)
                check_claim_place(visit.manifest, visit.head, claim)
                found[claim.signer] = claim
    return [found[peer] for peer in sorted(found)]
