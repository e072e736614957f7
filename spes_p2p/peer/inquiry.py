"""Asking around before a commit of a few is followed: its makers alone say that the others are gone (SPEC 5.13).

    the head that it follows --> up to 16 others: what follows there? --each answer checked--> core.forks.judge_few

An answer is the reply to a `chain` request; a record in it counts only if it could follow the head.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable

from spes_p2p.core.forks import Few, Rank, given_up, judge_few, rank_of
from spes_p2p.core.head import Head
from spes_p2p.net import timeouts
from spes_p2p.net.transport import Transport
from spes_p2p.peer.ledger_sync import id_of
from spes_p2p.store.chain import Chain, Step
from spes_protocols.codec import decode, encode
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.requests import CHAIN, ChainReply, ChainRequest

ASKED_MAX = 16
"""So many are asked, at most half of them because they own groups at that head."""

ASK_SECONDS = timeouts.ASK
"""How long an answer may take."""

KEPT_SECONDS = 10.0
"""So long answers hold for all ledgers that offer a commit of a few for the same head."""


class Inquiry:
    """What others have after a head. `others` are the peers that can be reached."""

    def __init__(self, transport: Transport, chain: Chain, others: Callable[[], Iterable[str]]) -> None:
        self._transport = transport
        self._chain = chain
        self._others = others
        self._asking = asyncio.Lock()
        self._asked_at = -1e9
        self._asked_for = b""
        self._answers: dict[str, Rank | None] = {}

    async def judge(self, peer: str, step: Step, *, has_waited: bool) -> Few:
        """What to do with a commit of a few that `peer` offers for our head."""
        async with self._asking:
            if self._asked_for != step.before.id or time.monotonic() - self._asked_at > KEPT_SECONDS:
                self._answers = await self._ask(step)
                self._asked_for, self._asked_at = step.before.id, time.monotonic()
        answers = {other: rank for other, rank in self._answers.items() if other != peer}
        return judge_few(rank_of(self._chain.manifest, step), given_up(step), answers, has_waited=has_waited)

    async def _ask(self, step: Step) -> dict[str, Rank | None]:
        peers = self._chosen(step.before)
        answers = await asyncio.gather(*(self._after(peer, step) for peer in peers), return_exceptions=True)
        found: dict[str, Rank | None] = {}
        for peer, answer in zip(peers, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[peer] = answer
            elif not isinstance(answer, NetworkError | RemoteError):
                raise answer
        return found

    def _chosen(self, head: Head) -> list[str]:
        """Owners of the head first, for they are said to be gone; strangers may know of what became of it."""
        peers = [peer for peer in dict.fromkeys(self._others()) if peer != self._transport.peer_id]
        random.shuffle(peers)
        owners = [peer for peer in peers if peer in head.electorate.weights][: ASKED_MAX // 2]
        return [*owners, *(peer for peer in peers if peer not in owners)][:ASKED_MAX]

    async def _after(self, peer: str, offered: Step) -> Rank | None:
        """The rank of the record that a peer has after the head, None if that is its last.

        Raises `NetworkError`, `RemoteError` if it says nothing about it.
        """
        head = offered.before
        request = encode(ChainRequest(known=(head.id,)))
        reply = decode(
            ChainReply, await self._transport.call(peer, CHAIN, request, timeout_seconds=ASK_SECONDS), peer=peer
        )
        if reply.first != self._chain.position_of(head.id):
            raise RemoteError("commit", "its ledger does not have this head", peer)
        if not reply.entries:
            return None
        entry = reply.entries[0]
        if id_of(entry) == offered.after.id:
            return rank_of(self._chain.manifest, offered)
        return rank_of(self._chain.manifest, self._chain.check_after(head, entry.kind, entry.data))
