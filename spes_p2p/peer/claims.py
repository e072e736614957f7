"""This peer's wish for expert groups, until it stands in the member table, and what others wish (SPEC 4.2, 4.5).

Claims go to everybody who is connected, and to the DHT for the others: whoever leads next may put them into its set.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p.peer.contacts import RECORDS_READ_MAX, Contacts
from spes_p2p.peer.shell import Shell
from spes_p2p.store.chain import Chain
from spes_protocols.errors import NetworkError
from spes_protocols.messages import Claim, Release

REPEAT_SECONDS = 5.0
LIFETIME_SECONDS = 120
READ_SECONDS = 10.0


class Claims:
    """The claims and the release of one peer. `may_ask` says whether it can keep what a claim promises: to train."""

    def __init__(
        self,
        me: str,
        wants: int,
        chain: Chain,
        shell: Shell,
        contacts: Contacts,
        *,
        may_ask: Callable[[], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        say: Callable[[str], None],
    ) -> None:
        self._me = me
        self._wants = wants
        self._chain = chain
        self._shell = shell
        self._contacts = contacts
        self._may_ask = may_ask
        self._spawn = spawn
        self._say = say
        self._asked_at = -1e9
        self._said = False

    def ask(self, *, again: bool = False) -> None:
        """Claim unless the table says already what we want; `again`: even if that was done just now."""
        head, now = self._chain.head, time.monotonic()
        member = head.member(self._me)
        if member is not None and member.wants == self._wants:
            self._said = False
            return
        if head.ended or self._me in head.banned or not self._may_ask():
            return
        if again or now - self._asked_at >= REPEAT_SECONDS:
            self._asked_at = now
            claim = Claim(
                run_id=head.run_id, round=head.round, commit=head.id, state_root=head.state_root, wants=self._wants
            )
            self._spawn(self._advertise(self._shell.say(claim).raw))
            self._tell()

    def release(self) -> None:
        """Give back what we own, with the commit that closes this round."""
        head = self._chain.head
        if head.member(self._me) is not None:
            self._shell.say(Release(run_id=head.run_id, epoch=head.epoch, round=head.round))

    async def read_others(self) -> None:
        """Take up claims from the DHT, for ever."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            if self._contacts.directory is None or self._chain.head.ended:
                continue
            with contextlib.suppress(NetworkError):
                found = await self._contacts.directory.lookup("claims")
                for raw in random.sample(found, min(len(found), RECORDS_READ_MAX)):
                    self._shell.take_claim(raw)
                    await asyncio.sleep(0)

    async def _advertise(self, raw: bytes) -> None:
        if self._contacts.directory is not None:
            with contextlib.suppress(NetworkError):
                await self._contacts.directory.publish("claims", raw, LIFETIME_SECONDS)

    def _tell(self) -> None:
        """Say once what was asked for, and when there will be an answer."""
        if not self._said:
            self._said = True
            groups = f"{self._wants} expert group{'s' if self._wants > 1 else ''}"
            decides = "the next commit" if self._chain.head.electorate.owners else "the start of the run"
            self._say(f"asked for {groups if self._wants else 'a place as a standby'}; {decides} decides")
