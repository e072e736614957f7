"""One peer of one run: network, ledger, state, trainer and control socket, put together (SPEC 12).

    LibP2P + Directory -- Contacts --+
    Chain, blobs, states -- Syncer --+-- Shell(Participant) -- TrainerLink -- trainer process
    Worker process ------------------+-- ControlServer

`run` returns when the peer has left, the run has ended, or `rounds_max` rounds are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p import __version__
from spes_p2p.core.assignment import member_sequences, next_cursor
from spes_p2p.core.ledger import CLAIMS_MAX, start_record
from spes_p2p.crypto.envelope import seal
from spes_p2p.crypto.keys import Identity
from spes_p2p.net.directory import Directory
from spes_p2p.net.libp2p import LibP2P
from spes_p2p.peer import stall, status
from spes_p2p.peer.catching_up import CatchingUp
from spes_p2p.peer.claims import Claims
from spes_p2p.peer.contacts import LIFETIME_SECONDS, Contacts, RunDirectory
from spes_p2p.peer.contribution import Publisher
from spes_p2p.peer.control import ControlServer
from spes_p2p.peer.options import PeerOptions
from spes_p2p.peer.outbox import Outbox
from spes_p2p.peer.reach import Reach
from spes_p2p.peer.recorder import Recorder
from spes_p2p.peer.retention import Retention
from spes_p2p.peer.service import Service
from spes_p2p.peer.shell import Shell
from spes_p2p.peer.sync import Syncer
from spes_p2p.peer.tasks import to_the_end
from spes_p2p.peer.trainer_link import TrainerLink
from spes_p2p.peer.worker import Worker
from spes_p2p.store.chain import Chain, Step
from spes_p2p.store.events import EventLog
from spes_p2p.store.rundir import RunDir
from spes_protocols import control_pb2
from spes_protocols.errors import NetworkError, RemoteError, SpesError, UserError
from spes_protocols.messages import ADDRESSES_MAX, Ban, End, Presence, Signed, Start

log = logging.getLogger(__name__)

LEAVE_SECONDS_MAX = 600.0
"""How long a leaver waits for the commit that lets it go."""

GIVE_UP_SECONDS = 60.0
"""The same for a peer that cannot train: nothing here depends on it, but others learn of its leave."""

SEE_OFF_SECONDS = 20.0
"""How long a peer that has done its rounds stays for those who have not closed the last one yet."""

PROGRESS_SECONDS = 5.0
SAME_LINE_SECONDS = 60.0
KEEP_SECONDS = 1.0
"""Pause before work that failed is begun again."""

DIRECTORY_TRIES = 8
"""Each waits some ten seconds for a daemon that is being started again."""

ERRORS_KEPT = 20


class Peer:
    """A running peer. `say` gets one line for the person at the machine whenever something worth it happens."""

    reach: Reach | None = None
    """How others get here; whoever runs this peer sees to it."""

    def __init__(
        self, options: PeerOptions, identity: Identity, run_dir: RunDir, transport: LibP2P, say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.identity = identity
        self.run_dir = run_dir
        self.manifest = run_dir.manifest.record
        self.transport = transport
        self.blobs = run_dir.blobs()
        self.states = run_dir.states()
        self.db = run_dir.ledger()
        self.chain = Chain(self.manifest, run_dir.run_id, self.db)
        whose = {"peer": identity.peer_id, "run": run_dir.run_id.hex(), "version": __version__}
        self.event_log = EventLog(run_dir.events_path, whose)
        self.events = Recorder(self.event_log.write)
        self.errors: deque[str] = deque(maxlen=ERRORS_KEPT)
        self.losses: deque[tuple[int, float]] = deque(maxlen=500)
        self.progress: tuple[str, float] = ("", -1.0)
        self.failure: SpesError | None = None
        self.leaving = False
        self.ready = False
        self._say = say
        self._finished = asyncio.Event()
        self._moved_at = time.monotonic()
        self._stall_told_at = -1e9
        self._told_at = -1e9
        self._noted: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._directory: Directory | None = None
        self._serves = options.is_reachable

        self.worker = Worker(run_dir, options.worker_threads, self.note)
        self.retention = Retention(self.chain, self.states, self.blobs, options, log=self.note)
        self.contacts = Contacts(
            transport, identity, run_dir.run_id, describe=self._presence, on_presence=self._on_presence,
            events=self.events,
        )  # fmt: skip
        self.outbox = Outbox(transport, self._on_refused, self.events)
        self.syncer = Syncer(
            self.manifest, transport, self.contacts, self.chain, self.states, self.blobs, self.worker,
            report=self._report, log=self.note, events=self.events, tidy=self.retention.tidy,
        )  # fmt: skip
        self.shell = Shell(
            identity, self.chain, self.syncer, self.worker, self.outbox, self.retention.leftovers,
            everyone=self._everyone, computes=options.computes, on_head=self._on_head, on_behind=self._on_behind,
            on_help=lambda peer: self._spawn(self.contacts.hello_soon(peer)), on_cut=self._on_cut, log=self.note,
            events=self.events,
        )  # fmt: skip
        self.catching_up = CatchingUp(
            transport, self.chain, self.states, self.contacts, self.syncer, self.shell,
            needs_state=lambda: options.computes and not self._is_over(),
            report=self._report, say=say, note=self.note,
        )  # fmt: skip
        self.claims = Claims(
            identity.peer_id, self._wanted_groups(), self.chain, self.shell, self.contacts,
            may_ask=self._may_claim, spawn=self._spawn, say=say,
        )  # fmt: skip
        self.publisher = Publisher(run_dir, self.chain, self.blobs, self.shell, self.note)
        self.trainer: TrainerLink | None = None
        if options.trains:
            self.trainer = TrainerLink(
                run_dir.path, options.trainer, self.manifest.rounds.stall_seconds,
                make_task=self._train_task, on_done=self.publisher.on_done, on_change=self._changed,
                on_hopeless=self._give_up, say=say, log=self.note, events=self.events,
            )  # fmt: skip
        self.control = ControlServer(
            run_dir, status=self.status, leave=self.leave, trainer=self.trainer,
            short_directory=transport.daemon.directory,
        )  # fmt: skip

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self, peers: list[str]) -> None:
        """Serve, catch up with `peers` (peer ids already connected), take part until the end. Always closes.

        Raises `UserError` after leaving when this machine turned out to be unable to train.
        """
        try:
            Service(
                self.transport, self.run_dir.manifest.raw, self.chain, self.states, self.blobs,
                on_hello=self.contacts.on_hello, on_push=self._on_push,
                claims=lambda: [claim.raw for claim in self.shell.participant.claims()],
                on_leaves=self.retention.asked_for,
            )  # fmt: skip
            self.syncer.exchange.serve()
            self.events.started(self.options.role, self.chain.head)
            await self.control.start()
            if not await self._unless_left(self._join(peers)):
                return
            self._remember_losses()
            self.ready = True
            head = self.chain.head
            waiting = "" if head.electorate.owners else ", when the organizer has started the run"
            self._say(f"up to date; round {head.round} is next{waiting}{' again' if waiting and head.round else ''}")
            self.shell.restore()
            for work in (
                self.shell.run_timer, self.contacts.run, self.catching_up.run_when_behind, self._look_after,
                self.claims.read_others,
            ):  # fmt: skip
                self._spawn(self.keep(work))
            if self.trainer is not None:
                self.trainer.start(self.control.socket)
            self._check_finished()
            await self._finished.wait()
            await self.outbox.flush(5.0)
            await self._see_off()
        finally:
            await to_the_end(self.close())  # a second signal may come while it ends
        if self.failure is not None:
            raise self.failure

    async def _join(self, peers: list[str]) -> None:
        """Meet those who are there and come up to date: a moment, or hours."""
        await self.catching_up.drop_other_states()  # a crash may have come between a branch and its states
        await self.catching_up.meet(peers)
        await self._join_directory(peers)
        await self.catching_up.join()

    async def _join_directory(self, peers: list[str]) -> None:
        """Join the DHT; without anybody to join through, wait to be found.

        A daemon that ends meanwhile is started again, and that is waited for; for ever it is not.
        """
        for attempt in range(DIRECTORY_TRIES):
            try:
                through = [] if attempt % 2 else peers
                is_client = not self._serves
                self._directory = await Directory.create(self.transport, self.identity, through, client_mode=is_client)
                break
            except NetworkError as error:
                if attempt + 1 == DIRECTORY_TRIES:
                    raise
                self.note(f"joining the directory: {error}")
        assert self._directory is not None
        await self._directory.serve(self._serves)  # that may have been found out meanwhile
        if offset := self._directory.clock_offset_seconds:
            way = "behind" if offset > 0 else "ahead of"
            self.note(f"this machine's clock is {abs(offset):.0f} s {way} the other peers'; corrected here, but set it")
        self.contacts.directory = RunDirectory(self._directory, self.run_dir.run_id)

    async def serve_directory(self, serves: bool) -> None:
        """Keep records of the DHT for others, or not: peers that cannot be reached would only hold up look-ups."""
        self._serves = serves
        if self._directory is not None:
            await self._directory.serve(serves)

    async def _unless_left(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do this, unless the peer is told to leave before it is done; returns whether it was done."""
        task, left = asyncio.create_task(work), asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            return task.done()
        finally:
            for each in (task, left):
                each.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    async def close(self) -> None:
        """End everything this peer started; the transport is the caller's to close."""
        self.ready = False  # whatever still comes in is turned away
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shell.close()
        if self.trainer is not None:
            await self.trainer.close()
        await self.outbox.close()
        await self.worker.close()
        await self.control.close()
        if self._directory is not None:
            await self._directory.close()
        self.db.close()
        self.events.stopped(self.failure)
        self.event_log.close()

    def leave(self) -> bool:
        """Leave after this round: give the groups back in its commit. At once when there is nothing to give back.

        Returns whether the round is waited for.
        """
        if self.leaving:
            return not self._finished.is_set()
        self.leaving = True
        head = self.chain.head
        if not self.ready or head.member(self.identity.peer_id) is None or head.ended or self._is_stuck():
            self._finished.set()
            return False
        self._say("leaving: this round is finished first, then the groups are given back (Ctrl-C again: at once)")
        self.claims.release()
        self._spawn(self._leave_at_last(LEAVE_SECONDS_MAX if self.failure is None else GIVE_UP_SECONDS))
        self._changed()
        return True

    def _give_up(self, problem: str) -> None:
        """This machine cannot train: leave, and end with the reason, which is said then."""
        self.failure = UserError(problem)
        self.errors.append(problem)
        self.events.noted(problem)
        self.leave()

    def _is_stuck(self) -> bool:
        """Whether no round can close any more because only this peer's contribution is missing, and will be."""
        head = self.chain.head
        others = head.electorate.total - head.electorate.weight([self.identity.peer_id])
        return self.failure is not None and not head.electorate.is_quorum(others)

    async def status(self) -> control_pb2.StatusReply:
        """What the commands and the terminal view show."""
        return await status.of(self)

    def note(self, line: str) -> None:
        """Something went wrong that the person at the machine may want to know; kept as the last error.

        A line that comes again and again, also in turn with a few others, is said once a minute.
        """
        now = time.monotonic()
        recent = [(text, at) for text, at in self._noted.items() if now - at < SAME_LINE_SECONDS]
        self._noted = dict(recent[-ERRORS_KEPT:])
        if line not in self._noted:
            self._noted[line] = now
            self._say(line)
        self.errors.append(line)
        self.events.noted(line)
        self._changed()

    # ---- taking part -------------------------------------------------------------------------------------------

    async def _on_push(self, sender: str, raw: bytes) -> bytes:
        if self.contacts.presence(sender) is not None:
            self.contacts.heard_from(sender)
        try:
            if not self.ready:
                raise RemoteError("busy", "this peer is still catching up")
            reply = await self.shell.on_push(sender, raw)
            self.contacts.heard_from(sender)  # not before: anybody can push anything, and would be sent records
            return reply
        except RemoteError as error:
            self.events.turned_away(sender, raw, error)
            raise

    def _on_presence(self, signed: Signed[Presence]) -> None:
        self.catching_up.on_presence(signed)

    def _on_behind(self, peer: str) -> None:
        self.catching_up.on_behind(peer)

    async def _on_head(self, step: Step | None) -> None:
        """The ledger moved on (the shell holds the lock)."""
        self._moved_at = time.monotonic()
        self.transport.favoured = frozenset(self.chain.head.electorate.owners)
        if step is not None and step.commit is not None:
            loss = status.mean_loss(step)
            self.losses.append((step.before.round, loss))
            if not self._finished.is_set():
                self._say(status.round_line(step, self.identity.peer_id, loss))
        if step is not None and step.opening is not None:
            try:
                await self.catching_up.drop_other_states()
            except SpesError as error:  # what else a new head brings must not wait for a damaged file
                self.note(f"removing states of another branch: {error}")
            self._say(status.opening_line(step))
        if step is not None and self.options.computes and not self._is_over():
            head = self.chain.head
            if not self.syncer.has_state(head.round, head.state_root):
                self._spawn(self._come_to_state())
        try:
            await asyncio.to_thread(self.retention.tidy)
        except SpesError as error:
            self.note(f"removing what is old: {error}")
        if self.ready:
            self.claims.ask(again=True)
            if self.leaving:
                self.claims.release()
            if self.trainer is not None:
                self.trainer.refresh()
            self._spawn(self.contacts.hello_all())
            self._check_finished()
        self._changed()

    async def _come_to_state(self) -> None:
        """Have the state of the head: a reset may name one that went long ago, or this machine computed another."""
        await self.catching_up.run()
        if self.trainer is not None:
            self.trainer.refresh()

    def _is_over(self) -> bool:
        """Whether a volunteer has come to a run that has ended: nothing to train, and perhaps nobody to ask."""
        return self.chain.head.ended and self.options.trains

    def _check_finished(self) -> None:
        head = self.chain.head
        limit = self.options.rounds_max
        if head.ended:
            self._say(f"the organizer has ended the run{self._reason(End)}")
        if self.identity.peer_id in head.banned and self.options.trains and self.failure is None:
            self.failure = UserError(f"the organizer has banned this peer{self._reason(Ban)}")
            self._finished.set()
        if limit is not None and head.round >= limit and not self._finished.is_set():
            self._say(f"the run has finished {status.counted(head.round, 'round')}; --rounds {limit} ends here")
        gone = self.leaving and head.member(self.identity.peer_id) is None
        if gone or self._is_over() or (limit is not None and head.round >= limit):
            self._finished.set()

    def _reason(self, kind: type[Ban] | type[End]) -> str:
        return status.order_reason(self.chain, self.identity.peer_id, kind)

    async def _look_after(self) -> None:
        """Claims are repeated until they stand in the table; a start key opens the run once enough claims are there."""
        while True:
            self.claims.ask()
            self._start_run()
            self._tell_of_stall()
            await asyncio.sleep(1.0)

    def waiting(self) -> str:
        """For whom a round waits that has not closed for too long, and what it takes to go on; empty if it has."""
        now = time.monotonic()
        return stall.waiting(self.shell.participant, now - self._moved_at, now)

    def _tell_of_stall(self) -> None:
        """Said when the time is over, then once in as long; the run goes on by itself when it can."""
        now = time.monotonic()
        if now - max(self._moved_at, self._stall_told_at) >= self.manifest.rounds.stall_seconds and (
            line := self.waiting()
        ):
            self._stall_told_at = now
            line = f"round {self.chain.head.round} has not closed for {now - self._moved_at:.0f} s: {line}"
            self.events.noted(line)
            self._say(line)

    def _may_claim(self) -> bool:
        """A claim is a promise to train: others wait `grace` for each member in every round."""
        return self.ready and not self.leaving and self.trainer is not None and self.trainer.is_ready

    def _wanted_groups(self) -> int:
        limit = self.manifest.ownership.per_peer_max
        return limit if self.options.groups is None else min(self.options.groups, limit)

    async def _see_off(self) -> None:
        """Serve members who are a round behind: if all the others ended at once, nobody had the blobs they lack.

        A leaver too: it may be the only one that knows of the commit that lets it go (SPEC 5.7).
        """
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(SEE_OFF_SECONDS):
                while await self._others_behind():
                    await asyncio.sleep(0.5)
                    await self.contacts.hello_all()

    async def _others_behind(self) -> bool:
        head, links = self.chain.head, await self.transport.links()
        linked = [self.contacts.presence(m.peer) for m in head.members if m.peer in links]
        return any(presence is None or presence.round < head.round for presence in linked)

    async def _leave_at_last(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._say("no commit took the groups back in time; leaving without it")
        self._finished.set()

    def _start_run(self) -> None:
        head = self.chain.head
        if self.options.start_key is None or any(m.groups for m in head.members) or head.ended:
            return
        claims = [claim for claim in self.shell.participant.claims() if claim.record.wants]
        wanted = self.manifest.ownership.min_peers
        if len(claims) < wanted:
            return
        # Of a flood, so many by chance as a record holds; the others stand in the commits that follow.
        claims = random.sample(claims, min(len(claims), max(CLAIMS_MAX, wanted)))
        start = seal(start_record(self.manifest, head, claims), Identity.load(self.options.start_key))
        self._spawn(self._open_run(start))

    async def _open_run(self, start: Signed[Start]) -> None:
        try:
            await self.shell.on_push(self.identity.peer_id, start.raw)
        except RemoteError as error:
            self.note(f"the run could not be started: {error}")

    # ---- the trainer -------------------------------------------------------------------------------------------

    def _train_task(self, ready: control_pb2.Ready | None) -> control_pb2.TrainRound | None:
        head = self.chain.head
        place, member = head.place(self.identity.peer_id), head.member(self.identity.peer_id)
        if not self.ready or place is None or member is None or head.ended or not head.electorate.owners:
            return None
        if self.db.own_header(head.epoch, head.round) is not None or self._limit_reached():
            return None
        if not self.syncer.has_state(head.round, head.state_root):
            return None  # it is on its way
        phase = self.manifest.phase(head.step)
        quota = self.manifest.round_sequences(head.step)
        task = control_pb2.TrainRound(
            round=head.round,
            epoch=head.epoch,
            state_path=str(self.states.path(head.round)),
            step=head.step,
            steps=phase.steps,
            batch_sequences=phase.batch_sequences,
            first_sequence=member_sequences(head.cursor, quota, place).start,
            groups=member.groups,
            out_dir=str(self.run_dir.out_dir),
        )
        if self.options.rounds_max != head.round + 1 and (ahead := self._steps_ahead(place)) is not None:
            task.ahead.CopyFrom(ahead)
        if ready is not None and ready.has_pending:
            self.publisher.fill_outcome(task, ready.pending_epoch, ready.pending_round)
        return task

    def _steps_ahead(self, place: int) -> control_pb2.LocalSteps | None:
        """What this peer is to train in the next round, if the member table stays; None: nothing ahead (SPEC 6.9)."""
        head, rounds = self.chain.head, self.manifest.rounds
        step = head.step + self.manifest.phase(head.step).steps
        if not rounds.lag or step < rounds.lag_from_step:
            return None
        cursor = next_cursor(head.cursor, self.manifest.round_sequences(head.step), len(head.members))
        phase = self.manifest.phase(step)
        return control_pb2.LocalSteps(
            step=step,
            steps=phase.steps,
            batch_sequences=phase.batch_sequences,
            first_sequence=member_sequences(cursor, self.manifest.round_sequences(step), place).start,
        )

    def _limit_reached(self) -> bool:
        return self.options.rounds_max is not None and self.chain.head.round >= self.options.rounds_max

    def _on_cut(self, round_number: int) -> None:
        if self.trainer is not None:
            self.trainer.cut(round_number)

    # ---- odds and ends -----------------------------------------------------------------------------------------

    async def _presence(self) -> Presence:
        head = self.chain.head
        return Presence(
            run_id=head.run_id,
            addresses=tuple(await self.transport.addresses())[:ADDRESSES_MAX],
            role=self.options.role,
            round=head.round,
            head=head.id,
            state_root=head.state_root,
            expires=int(time.time()) + LIFETIME_SECONDS,
        )

    def _everyone(self) -> list[str]:
        members = [m.peer for m in self.chain.head.members]
        return list(dict.fromkeys([*members, *self.contacts.fresh()]))

    def _on_refused(self, peer: str, error: RemoteError) -> None:
        if error.check not in ("busy", "claim", "release"):
            self.note(f"{peer[-8:]} refused a record of ours: {error.check}: {error.detail}")

    def _remember_losses(self) -> None:
        for step in self.chain.walk():
            if step.commit is not None:
                self.losses.append((step.before.round, status.mean_loss(step)))

    def _report(self, text: str, share: float) -> None:
        now = time.monotonic()
        if text != self.progress[0]:
            self._told_at = now
        elif text and now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            self._say(f"{text}: {share:.0%}{self.syncer.meter.words()}")
        self.progress = (text, share)
        self._changed()

    def _changed(self) -> None:
        self.control.changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        task.add_done_callback(self._report_failure)

    async def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work that must not end while the peer lives: after a failure it is said so, and begun again."""
        while True:
            try:
                await work()
            except Exception as error:
                if not isinstance(error, SpesError):
                    log.exception("what goes on beside the rounds has failed, and is begun again")
                self.note(_failure_line(error))
            await asyncio.sleep(KEEP_SECONDS)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        self.note(_failure_line(task.exception()))


def _failure_line(error: BaseException | None) -> str:
    if isinstance(error, SpesError):
        return str(error)
    return ": ".join(filter(None, ("internal error", type(error).__name__, str(error))))
