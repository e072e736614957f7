"""Who has more of the ledger than we do, or a better branch: found by asking, since anybody can say so (SPEC 8).

A peer that claims to be ahead and has no record that we would take costs one question; the next comes after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from spes_p2p.peer.contacts import CONTACTS_MAX, Contacts
from spes_p2p.peer.ledger_sync import Answer, LedgerReader
from spes_p2p.store.chain import Chain
from spes_protocols.errors import NetworkError, RemoteError
from spes_protocols.messages import Presence

PAUSE_SECONDS_MIN = 5.0
PAUSE_SECONDS_MAX = 300.0
"""The pause doubles up to this."""

ASKED_AT_FIRST = 4

log = logging.getLogger(__name__)


class Ahead:
    """Finds the peers of one run whose ledger goes on where ours ends, or goes before it."""

    def __init__(self, chain: Chain, contacts: Contacts, ledger: LedgerReader) -> None:
        self._chain = chain
        self._contacts = contacts
        self._ledger = ledger
        self._unhelpful: dict[str, tuple[float, float]] = {}

    def may_be(self, peer: str) -> bool:
        """Whether a peer is ahead by what it says of itself, and has not just been found to be wrong about it."""
        return not self._is_pausing(peer) and self._says_so(peer)

    def _says_so(self, peer: str) -> bool:
        presence = self._contacts.presence(peer)
        if presence is None:
            return peer in self._contacts.fresh()
        return self.is_news(presence)

    def is_news(self, presence: Presence) -> bool:
        """Whether a peer says of itself that it has a head which is not in our ledger."""
        return presence.head != b"" and self._chain.position_of(presence.head) is None

    async def someone(self, *, everybody: bool = False) -> str | None:
        """A peer with records for us: owners are asked first, then ever more of the others at a time.

        With `everybody`, those too who do not say that they are ahead.
        """
        owners = self._chain.head.electorate.weights
        left = [
            peer for peer in self._contacts.fresh() if (everybody or self.may_be(peer)) and not self._is_pausing(peer)
        ]
        random.shuffle(left)
        left.sort(key=lambda peer: peer not in owners)
        at_once = ASKED_AT_FIRST
        while left:
            asked, left = left[:at_once], left[at_once:]
            at_once *= 2
            answers = await asyncio.gather(*(self._has_more(peer) for peer in asked))
            for peer, has_more in zip(asked, answers, strict=True):
                if has_more:
                    return peer
        return None

    def was_wrong(self, peer: str) -> None:
        """A peer had nothing for us: leave it alone for a while."""
        _, pause = self._unhelpful.pop(peer, (0.0, PAUSE_SECONDS_MIN / 2))
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
        self._unhelpful[peer] = (time.monotonic() + pause, pause)
        if len(self._unhelpful) > CONTACTS_MAX:
            del self._unhelpful[next(iter(self._unhelpful))]

    def _is_pausing(self, peer: str) -> bool:
        return time.monotonic() < self._unhelpful.get(peer, (0.0, 0.0))[0]

    async def _has_more(self, peer: str) -> bool:
        try:
            has_more = await self._ledger.compare(peer) in (Answer.LONGER, Answer.BETTER)
        except (NetworkError, RemoteError) as error:
            log.info("ledger of %s: %s", peer, error)
            has_more = False
        if has_more:
            self._unhelpful.pop(peer, None)
        elif self._says_so(peer):  # asked unasked, it is no worse than we are
            self.was_wrong(peer)
        return has_more
