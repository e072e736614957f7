"""Coming up to date, when the program starts and whenever others turn out to be ahead (SPEC 8.1, 8.3).

    presence or record from ahead --Ahead: is it?--> LedgerReader: records --Syncer--> the head's state --> next round

Nobody is believed to be ahead: whoever says so is asked for what follows our head.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from spes_p2p.core.forks import Few
from spes_p2p.core.head import Head
from spes_p2p.net.transport import Transport
from spes_p2p.peer import status
from spes_p2p.peer.ahead import Ahead
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.inquiry import Inquiry
from spes_p2p.peer.ledger_sync import LEDGER_SECONDS, LedgerReader, Read
from spes_p2p.peer.shell import Shell
from spes_p2p.peer.sync import Report, Syncer
from spes_p2p.store.chain import Chain, Step
from spes_p2p.store.states import StateStore
from spes_protocols.errors import NetworkError, RemoteError, SpesError
from spes_protocols.messages import Presence, Signed

SETTLE_SECONDS = 0.5
"""A peer that has just committed is ahead for a moment; our own commit is under way then."""

RETRY_SECONDS = 2.0
"""Pause before those who are there are asked again for a state that nobody had."""


class CatchingUp:
    """Brings the ledger and the state of one peer to where the others are, and moves its shell on.

    `needs_state` says whether the state of the head is wanted too. `say` gets lines for the person at the machine,
    `note` what went wrong.
    """

    def __init__(
        self,
        transport: Transport,
        chain: Chain,
        states: StateStore,
        contacts: Contacts,
        syncer: Syncer,
        shell: Shell,
        *,
        needs_state: Callable[[], bool],
        report: Report,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._chain = chain
        self._states = states
        self._contacts = contacts
        self._syncer = syncer
        self._shell = shell
        self._needs_state = needs_state
        self._report = report
        self._say = say
        self._note = note
        self._takes_part = False
        self._behind: asyncio.Queue[str] = asyncio.Queue(64)
        self._inquiry = Inquiry(transport, chain, contacts.fresh)
        self._stopped_at = (b"", 0.0)
        self._reads_since: float | None = None
        self.ledger = LedgerReader(transport, chain, report, self._consents)
        self._ahead = Ahead(chain, contacts, self.ledger)

    async def meet(self, peers: Sequence[str]) -> None:
        """Say hello to those who are there."""
        for peer in peers:
            with contextlib.suppress(NetworkError, RemoteError):
                await self._contacts.hello(peer)
        await self._contacts.hello_all()

    async def join(self) -> None:
        """Come up to date for the first time since the start: a moment, or hours. From then on the peer takes part."""
        await self.run(first=True)
        self._takes_part = True

    async def run(self, *, first: bool = False) -> None:
        """Ledger from those who are ahead, then the state; retries as long as nobody can help."""
        while True:
            # Asked outside the lock, which our own commits need: anybody can say that it is ahead, and then be silent.
            peer = await self._ahead.someone(everybody=first)
            async with self._shell.advancing:
                came = 0
                while peer is not None:
                    came += await self._ledger_from(peer)
                    peer = await self._ahead.someone(everybody=True) if first else None
                try:
                    if self._needs_state():
                        await self._syncer.state()
                    if first or self._lags():
                        await self._shell.moved(None)
                    self._report("", -1.0)
                    if first or not came:
                        return
                    continue
                except NetworkError as error:
                    held = ", ".join(map(str, self._states.rounds()[-2:])) or "none"
                    self._note(f"{error}; trying again (states here: {held})")
            await asyncio.sleep(RETRY_SECONDS)
            await self._contacts.hello_all()

    async def run_when_behind(self) -> None:
        """Catch up whenever somebody is found to be ahead, for ever."""
        while True:
            peer = await self._behind.get()
            while not self._behind.empty():
                self._behind.get_nowait()
            await self._contacts.hello_soon(peer)
            if self._is_behind(peer):
                await asyncio.sleep(SETTLE_SECONDS)
                if self._is_behind(peer):
                    try:
                        await self.run()
                    except SpesError as error:  # a full disk, say: whoever speaks of a later round wakes us again
                        self._note(f"catching up: {error}")

    def on_behind(self, peer: str) -> None:
        """A record of a later round has come from this peer: it is ahead, or says so."""
        with contextlib.suppress(asyncio.QueueFull):
            self._behind.put_nowait(peer)

    def on_presence(self, signed: Signed[Presence]) -> None:
        """What a peer says of itself."""
        if self._ahead.is_news(signed.record):
            self.on_behind(signed.signer)

    async def drop_other_states(self) -> None:
        """Remove the states of a branch that is no longer in force; nobody could use them.

        The one after the head's stays: it may be what this peer votes for. Raises `IntegrityError` at a damaged one.
        """
        for number in self._states.rounds():
            if self._states.is_other(number, self._chain.root_at(number), newest=self._chain.head.round + 1):
                await asyncio.to_thread(self._states.remove, number)

    def _is_behind(self, peer: str) -> bool:
        return self._ahead.may_be(peer) or self._lags()

    def _lags(self) -> bool:
        """Whether the round is not yet that of the ledger here: a full disk, say, had kept its state away."""
        return self._chain.head.id != self._shell.participant.head.id

    async def _consents(self, peer: str, step: Step) -> None:
        """Raises `RemoteError` at a commit of a few that is not to be followed, or not yet (SPEC 5.12, 5.13)."""
        few = await self._judge(peer, step)
        if few == Few.BETTER:
            raise RemoteError("votes", f"round {step.before.round} was closed by few, and others have a better commit")
        if few == Few.WAIT:
            raise RemoteError("votes", f"round {step.before.round} was closed by few, and others still wait for all")

    async def _judge(self, peer: str, step: Step) -> Few:
        head = step.before
        if self._takes_part and self._shell.participant.head.id == head.id:
            self._shell.wait_for_few()
            return Few.TAKE if self._shell.follows_few(step) else Few.WAIT
        if self._reads_since is not None and time.monotonic() - self._reads_since > LEDGER_SECONDS:
            # Each may take seconds, and our own commits wait; what came before it is kept, and more is read later.
            raise RemoteError("votes", "others have been asked about this ledger for long enough")
        few = await self._inquiry.judge(peer, step, has_waited=self._has_waited(head))
        if few != Few.TAKE and self._stopped_at[0] != head.id:
            self._stopped_at = (head.id, time.monotonic())
        return few

    def _has_waited(self, head: Head) -> bool:
        """Whether a commit of a few has been offered for this head for so long that the others had their time."""
        id, since = self._stopped_at
        return id == head.id and time.monotonic() - since >= self._chain.manifest.rounds.lease_seconds

    async def _ledger_from(self, peer: str) -> int:
        """Take what a peer's ledger has for us; returns how many records."""
        read = Read()
        self._reads_since = time.monotonic()
        try:
            read = await self.ledger.read(peer)
        except (NetworkError, RemoteError) as error:
            self._note(f"ledger of {peer}: {error}")
        finally:
            self._reads_since = None
        if read.taken_back:
            lost = status.counted(read.taken_back, "record")
            self._say(f"the ledger of …{peer[-6:]} goes before ours: {lost} taken back here")
            self._shell.end_round()
            await self.drop_other_states()
        if read.came > 1:  # a single one is what a peer next to the others misses now and then
            self._say(
                f"read {read.came} records of the ledger from …{peer[-6:]}: now before round {self._chain.head.round}"
            )
        if not read.came:
            self._ahead.was_wrong(peer)
        return read.came
