"""`spes-replay fetch`: a run's log from its peers into a directory that the other verbs read.

    address -> manifest (pinned) -> ledger, each record checked -> blobs by digest -> the newest snapshot

Everything is checked as a joining peer checks it, so any peer may be asked. What is there from an earlier try is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.core.roots import state_root
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.peer import joining
from spes_p2p.peer.contacts import Contacts
from spes_p2p.peer.ledger_sync import LedgerReader
from spes_p2p.peer.sync import CALL_SECONDS, Report, Syncer
from spes_p2p.peer.worker import Worker
from spes_p2p.replay.fetch import Wanted, first_whole_round, missing_blobs, other_states, wanted_blobs
from spes_p2p.replay.log import Log
from spes_p2p.store.chain import Chain
from spes_p2p.store.files import make_directory
from spes_p2p.store.ledger_db import LedgerDB
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import decode
from spes_protocols.errors import NetworkError, RemoteError, SpesError, UserError
from spes_protocols.messages import Presence
from spes_protocols.requests import HELLO, PUSH, SNAPSHOTS, SnapshotsReply

AT_ONCE = 8
"""Blobs that are fetched at a time."""

_BLOB_SECONDS = 60.0
_BYTES_PER_SECOND_MIN = 50_000
_PRESENCE_SECONDS = 60

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A blob that no peer gave; `refused` blobs serve to check a refusal only."""

    round: int
    peer: str
    section: str
    blob: bytes
    refused: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The log as it lies on disk now. `fetched` counts the blobs that came this time, `snapshot` is the newest one.

    `taken_back` counts the records here that a better branch (SPEC 5.13) has replaced, of earlier fetches or this one.
    """

    dir: Path
    run_id: bytes
    rounds: int
    taken_back: int
    blobs: int
    fetched: int
    missing: tuple[Missing, ...]
    snapshot: int | None
    next_command: str


async def fetch(home: Path, addresses: Sequence[str], say: Say, report: Report) -> Fetched:
    """Download what the log in `home` lacks. Raises `NetworkError` when no peer helps, `UserError`, `RemoteError`."""
    wanted = joining.expected_run(addresses)
    async with contextlib.AsyncExitStack() as stack:
        known = _known(home, wanted)
        if known is not None:
            stack.enter_context(known.lock())
        report("connecting", -1.0)
        identity, transport = await stack.enter_async_context(_stranger())
        reached = await joining.connect_any(transport, addresses)
        manifest = await joining.fetch_manifest(transport, reached, known.run_id if known is not None else wanted)
        run = known
        if run is None:
            make_directory(home)
            run = joining.open_pinned(home, manifest)
            stack.enter_context(run.lock())
        say(joining.introduction(manifest))
        db = stack.enter_context(run.ledger())
        fetcher = _Fetcher(run, identity, transport, db, say, report)
        stack.push_async_callback(fetcher.close)
        return await fetcher.run(reached)


def _known(home: Path, wanted: bytes | None) -> RunDir | None:
    """What an earlier fetch (or join) began: `home` is a run's directory or a home."""
    if not (home / "manifest").exists():
        return joining.open_known(home, wanted)
    run = RunDir.open(home)
    if wanted is not None and run.run_id != wanted:
        raise UserError(f"{home} holds run {run.run_id.hex()[:16]}, the address names {wanted.hex()[:16]}")
    return run


@contextlib.asynccontextmanager
async def _stranger() -> AsyncIterator[tuple[Identity, LibP2P]]:
    """A network under a key of the moment: who fetches a log is nobody in the run."""
    with tempfile.TemporaryDirectory(prefix="spes-replay-") as folder:
        identity = Identity.generate()
        path = Path(folder) / "identity"
        identity.save(path)
        transport = await LibP2P.create(
            identity_path=path, peer_id=identity.peer_id, log_path=Path(folder) / "p2pd.log"
        )  # fmt: skip
        try:
            yield identity, transport
        finally:
            await transport.close()


class _Fetcher:
    """One download of one run."""

    def __init__(
        self, run: RunDir, identity: Identity, transport: LibP2P, db: LedgerDB, say: Say, report: Report
    ) -> None:
        self._run = run
        self._transport = transport
        self._say = say
        self._report = report
        self._chain = Chain(run.manifest.record, run.run_id, db)
        self._blobs = run.blobs()
        self._states = run.states()
        self._worker = Worker(run, 1, say)  # nothing is applied here; it never starts
        self._contacts = Contacts(
            transport, identity, run.run_id, describe=self._presence, on_presence=lambda signed: None
        )  # fmt: skip
        self._syncer = Syncer(
            run.manifest.record, transport, self._contacts, self._chain, self._states, self._blobs, self._worker,
            report=report, log=say,
        )  # fmt: skip
        self._keeping: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End what runs in the background."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def run(self, reached: Sequence[str]) -> Fetched:
        """Ledger, blobs, snapshot."""
        self._transport.handle(HELLO, self._contacts.on_hello)
        self._transport.handle(PUSH, _ignore)
        for peer in reached:
            with contextlib.suppress(NetworkError, RemoteError):
                await self._contacts.hello(peer)
        await self._contacts.hello_all()
        self._keeping = asyncio.create_task(self._contacts.run())
        taken_back = await self._ledger(reached)
        for number in other_states(self._chain, self._states, rolled_back=taken_back > 0):
            self._states.remove(number)
        wanted = await asyncio.to_thread(wanted_blobs, Log(self._chain.manifest, self._chain.run_id, self._chain.db))
        lacking = missing_blobs(wanted, self._blobs)
        missing = await self._all_blobs(lacking)
        await self._first_state()
        await self._snapshot()
        return self._result(wanted, len(lacking) - len(missing), missing, taken_back)

    async def _presence(self) -> Presence:
        """As a bootstrap is nobody asked for blobs; without addresses nobody calls."""
        return Presence(
            run_id=self._run.run_id,
            addresses=(),
            role="bootstrap",
            round=0,
            head=b"",
            state_root=b"",
            expires=int(time.time()) + _PRESENCE_SECONDS,
        )

    async def _ledger(self, reached: Sequence[str]) -> int:
        """The best branch that a peer has, and all that follows; returns how many records here it has replaced."""
        problems, taken_back = [], 0
        ledger = LedgerReader(self._transport, self._chain, self._report)
        peers = dict.fromkeys([*reached, *self._contacts.fresh()])
        for peer in peers:
            try:
                read = await ledger.read(peer)
                if read.taken_back:
                    self._say(f"the ledger of {peer} goes before what was here: {read.taken_back} records taken back")
                taken_back += read.taken_back
            except (NetworkError, RemoteError) as error:
                problems.append(str(error))
                self._say(f"ledger of {peer}: {error}")
        if len(problems) == len(peers):
            raise NetworkError(f"no peer gave the ledger: {'; '.join(problems)}")
        return taken_back

    async def _all_blobs(self, lacking: Sequence[Wanted]) -> list[Missing]:
        total = max(1, sum(item.section.size for item in lacking))
        done = 0
        missing: list[Missing] = []
        queue = iter(lacking)

        async def draw() -> None:
            nonlocal done
            for item in queue:
                seconds = _BLOB_SECONDS + item.section.size / _BYTES_PER_SECOND_MIN
                try:
                    await self._syncer.blob(item.section, item.sender, time.monotonic() + seconds)
                except (NetworkError, RemoteError) as error:
                    missing.append(_missing(item, error))
                done += item.section.size
                self._report(f"fetching blobs of round {item.round}", done / total)

        for problem in await asyncio.gather(*(draw() for _ in range(AT_ONCE)), return_exceptions=True):
            if problem is not None:
                raise problem
        return sorted(missing, key=lambda item: item.round)

    async def _snapshot(self) -> None:
        """The newest state that a peer serves and the ledger names."""
        offered: set[int] = set()
        for peer in self._contacts.volunteers():
            try:
                raw = await self._transport.call(peer, SNAPSHOTS, b"", timeout_seconds=CALL_SECONDS)
                offered |= set(decode(SnapshotsReply, raw, peer=peer).rounds)
            except (NetworkError, RemoteError) as error:
                self._say(f"snapshots of {peer}: {error}")
        rounds = sorted(r for r in offered if r <= self._chain.head.round and self._chain.root_at(r) is not None)
        newest = self._newest()
        if not rounds or (newest is not None and newest >= rounds[-1]):
            return
        await self._try_snapshot(rounds[-1])

    async def _first_state(self) -> None:
        """S_0, where the log cannot be verified without it: a run that does not begin with its seed."""
        manifest = self._chain.manifest
        if manifest.genesis == "snapshot" and not self._syncer.has_state(0, manifest.genesis_root):
            await self._try_snapshot(0)

    async def _try_snapshot(self, round_number: int) -> None:
        try:
            await self._syncer.snapshot_at(round_number)
        except NetworkError as error:
            self._say(f"no snapshot: {error}")

    def _newest(self) -> int | None:
        """The newest state here that is the ledger's, by its index."""
        rounds = (r for r in reversed(self._states.rounds()) if r <= self._chain.head.round)
        return next((r for r in rounds if state_root(self._states.index(r)) == self._chain.root_at(r)), None)

    def _result(self, wanted: list[Wanted], fetched: int, missing: list[Missing], taken_back: int) -> Fetched:
        newest = self._newest()
        command = ["spes-replay", "verify", str(self._run.path)]
        whole_from = first_whole_round(wanted, self._blobs)
        if newest is not None and 0 < whole_from <= newest:
            command += ["--from-snapshot", str(newest)]
        return Fetched(
            dir=self._run.path,
            run_id=self._run.run_id,
            rounds=self._chain.head.round,
            taken_back=taken_back,
            blobs=len(wanted) - len(missing),
            fetched=fetched,
            missing=tuple(missing),
            snapshot=newest,
            next_command=shlex.join(command),
        )


def _missing(item: Wanted, error: SpesError) -> Missing:
    return Missing(
        round=item.round,
        peer=item.sender,
        section=item.section.name,
        blob=item.section.blob,
        refused=item.refused,
        reason=str(error),
    )


async def _ignore(sender: str, request: bytes) -> bytes:
    """Records of the round in hand, which a log has no use for."""
    return b""
