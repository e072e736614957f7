"""Catching up: the ledger, from whoever has more of it or a better branch (SPEC 5.13, 8).

    CHAIN --every record checked--> the head's successor: Chain.append
                                    another successor of an earlier head: Branch --is_better--> Chain.adopt

Nothing that arrives is trusted: a record is checked against the one before it, as when it is read from disk.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spes_p2p.core.forks import is_later_reset, strength_of
from spes_p2p.core.members import Strength
from spes_p2p.crypto.envelope import unseal
from spes_p2p.net import timeouts
from spes_p2p.net.transport import Transport
from spes_p2p.peer.sync import CALL_SECONDS, Report
from spes_p2p.store.chain import Branch, Chain, Step
from spes_protocols.codec import decode, encode, sha256
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Commit, Reset, Sealed
from spes_protocols.requests import CHAIN, ChainEntry, ChainReply, ChainRequest

LEDGER_SECONDS = timeouts.LEDGER
"""How long one peer may let us wait for its ledger in all; another has it too."""


class Answer(enum.Enum):
    """How another peer's ledger stands to ours."""

    SAME = enum.auto()
    LONGER = enum.auto()
    BETTER = enum.auto()
    WORSE = enum.auto()


@dataclass(frozen=True)
class Read:
    """What reading a ledger brought: records that are new here, and those that were taken back for them."""

    came: int = 0
    taken_back: int = 0


async def _take_any(peer: str, step: Step) -> None:
    pass


class LedgerReader:
    """Brings one run's ledger up to date from other peers.

    `consents` raises `RemoteError` at a commit of a few that this peer is not to follow (SPEC 5.13): a liar could make
    one alone at any time. It is asked for each of them that would follow our head.
    """

    def __init__(
        self,
        transport: Transport,
        chain: Chain,
        report: Report,
        consents: Callable[[str, Step], Awaitable[None]] = _take_any,
    ) -> None:
        self._transport = transport
        self._chain = chain
        self._report = report
        self._consents = consents

    async def read(self, peer: str) -> Read:
        """Append what `peer` has beyond our head, or adopt its branch if that is better.

        Raises `NetworkError`, `RemoteError` if nothing came before; what did is kept, and said.
        """
        came, taken_back, waited = 0, 0, 0.0
        while waited < LEDGER_SECONDS:
            try:
                asked = time.monotonic()
                reply = await self._part(peer, self._chain.known())
                waited += time.monotonic() - asked
                entries = self._unknown(reply)
                if not entries:
                    break
                position = reply.first + len(reply.entries) - len(entries)
                if position < self._chain.length:
                    branch = await self._branch(peer, position, reply, entries)
                    if branch is None:
                        break
                    taken_back += self._chain.length - position
                    self._chain.adopt(branch.steps)
                    came += len(branch.steps)
                else:
                    appended, seconds = await self._append(peer, entries, reply.length)
                    came += appended
                    waited += seconds
            except (NetworkError, RemoteError):
                if not came:
                    raise
                break
        return Read(came, taken_back)

    async def compare(self, peer: str) -> Answer:
        """How a peer's ledger stands to ours, by its next records. Raises `NetworkError`, `RemoteError`."""
        reply = await self._part(peer, self._chain.known())
        entries = self._unknown(reply)
        if not entries:
            return Answer.SAME
        position = reply.first + len(reply.entries) - len(entries)
        if position == self._chain.length:
            await self._check_next(peer, entries[0])
            return Answer.LONGER
        return Answer.WORSE if await self._branch(peer, position, reply, entries) is None else Answer.BETTER

    async def _part(self, peer: str, known: tuple[bytes, ...]) -> ChainReply:
        request = encode(ChainRequest(known=known))
        reply = await self._transport.call(peer, CHAIN, request, timeout_seconds=CALL_SECONDS)
        return decode(ChainReply, reply, peer=peer)

    def _unknown(self, reply: ChainReply) -> tuple[ChainEntry, ...]:
        """The records of a reply from the first on that is not in our ledger; none if it begins elsewhere."""
        if reply.first > self._chain.length:
            return ()
        for number, entry in enumerate(reply.entries):
            if self._chain.position_of(id_of(entry)) != reply.first + number + 1:
                return reply.entries[number:]
        return ()

    async def _check_next(self, peer: str, entry: ChainEntry) -> tuple[Step, float]:
        """Check the record after our head; the seconds are those that others were asked about it."""
        step = self._chain.check(entry.kind, entry.data)
        begun = time.monotonic()
        if strength_of(step) == Strength.ANY:
            await self._consents(peer, step)
        return step, time.monotonic() - begun

    async def _append(self, peer: str, entries: tuple[ChainEntry, ...], length: int) -> tuple[int, float]:
        """How many were good, and how long that took without our own work. Raises `RemoteError` if none was."""
        waited = 0.0
        for number, entry in enumerate(entries):
            try:
                step, seconds = await self._check_next(peer, entry)
            except RemoteError:
                if not number:
                    raise
                return number, waited  # those before it are good
            waited += seconds
            self._chain.append(step)
            self._report("reading the ledger", self._chain.length / max(length, 1))
            await asyncio.sleep(0)
        return len(entries), waited

    async def _branch(
        self, peer: str, position: int, reply: ChainReply, entries: tuple[ChainEntry, ...]
    ) -> Branch | None:
        """The peer's branch, read as far as it takes to know that it is better than ours; None if it is not.

        A commit of a few that is not needed to know it is left to be read as one that follows our head.
        """
        branch = self._chain.branch(position)
        if branch is None:
            raise RemoteError("commit", "its ledger parts from ours too far back", peer)
        branch.add(entries[0].kind, entries[0].data)
        # A reset further on counts more than where the branches part, and is worth reading on for, as far as its round.
        deadline = time.monotonic() + LEDGER_SECONDS
        rest = entries[1:]
        is_better = branch.is_better
        goal = -1 if is_better else self._later_reset(peer, reply)
        while rest and (is_better or branch.head.round <= goal):
            for entry in rest:
                step = branch.check(entry.kind, entry.data)
                if is_better and strength_of(step) == Strength.ANY:
                    return branch
                branch.take(step)
                is_better = is_better or (step.opening is not None and branch.is_better)
                await asyncio.sleep(0)
            if is_better or branch.head.round > goal or time.monotonic() > deadline:
                break
            rest = (await self._part(peer, (branch.head.id,))).entries
        return branch if is_better else None

    def _later_reset(self, peer: str, reply: ChainReply) -> int:
        """Round of the reset that makes a peer's ledger go before ours, -1 if it shows none.

        Raises `RemoteError` if what it shows is no signed reset.
        """
        if not reply.reset:
            return -1
        reset = unseal(reply.reset, Reset, peer=peer)
        return reset.record.round if is_later_reset(self._chain.manifest, self._chain.head, reset) else -1


def id_of(entry: ChainEntry) -> bytes:
    """The id of the head after a record that nobody has checked: no signature is looked at for one that is here."""
    if entry.kind == "commit":
        return decode(Commit, entry.data).id
    return sha256(decode(Sealed, entry.data).payload)
