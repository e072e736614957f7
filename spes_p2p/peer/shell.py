"""The event-loop shell around `core.rounds.Participant`: it moves bytes and keeps the timer, and decides nothing.

    network --unseal--> Participant --outputs--> sign, store, send | fetch | apply | commit
                             ^                                               |
                             +------------- on_said, on_checked, on_applied, on_head

A vote is on disk before it is on the wire (SPEC 5.5). Everything long runs in tasks that end with the round.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from spes_p2p.core import rounds
from spes_p2p.core.forks import given_up
from spes_p2p.core.outputs import (
    Abstain,
    Apply,
    Behind,
    Committed,
    Cut,
    Doubled,
    Fetch,
    Halt,
    Help,
    Refused,
    Relented,
    Resend,
    RootsDiffer,
    Say,
)
from spes_p2p.core.rounds import Opened, Participant
from spes_p2p.crypto.envelope import seal, unseal, unseal_votes, verify_set
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.contributions import contributions
from spes_p2p.peer.leftovers import Leftovers
from spes_p2p.peer.outbox import Outbox
from spes_p2p.peer.phases import PhaseClock
from spes_p2p.peer.recorder import Recorder
from spes_p2p.peer.silence import Silence
from spes_p2p.peer.sync import Syncer
from spes_p2p.peer.tasks import to_the_end
from spes_p2p.peer.worker import Worker
from spes_p2p.store.chain import Chain, Step
from spes_protocols.codec import decode, digest, encode
from spes_protocols.errors import NetworkError, RemoteError, SpesError, UserError
from spes_protocols.messages import (
    Ban,
    Claim,
    Commit,
    End,
    Header,
    Precommit,
    Prevote,
    Proposal,
    ProposedSet,
    Release,
    Reset,
    Signed,
    Start,
    VerifiedSet,
)

RETRY_SECONDS = 5.0
"""Pause before a fetch or apply that failed is tried again."""

PUSHED = (Header, Claim, Release, Ban, End, Proposal, Prevote, Precommit, Start, Reset)


class Shell:
    """Runs one participant. `computes` is False for a bootstrap that follows the ledger without blobs or states."""

    def __init__(
        self,
        identity: Identity,
        chain: Chain,
        syncer: Syncer,
        worker: Worker,
        outbox: Outbox,
        leftovers: Leftovers,
        *,
        everyone: Callable[[], Iterable[str]],
        computes: bool,
        on_head: Callable[[Step | None], Awaitable[None]],
        on_behind: Callable[[str], None],
        on_help: Callable[[str], None],
        on_cut: Callable[[int], None],
        log: Callable[[str], None],
        events: Recorder,
    ) -> None:
        self.participant = Participant(chain.manifest, identity.peer_id, chain.head)
        self.advancing = asyncio.Lock()
        self._identity = identity
        self._chain = chain
        self._syncer = syncer
        self._worker = worker
        self._outbox = outbox
        outbox.on_unreachable = self._on_unreachable
        self.leftovers = leftovers
        self._everyone = everyone
        self._computes = computes
        self._on_head = on_head
        self._on_behind = on_behind
        self._on_help = on_help
        self._on_cut = on_cut
        self._log = log
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()
        self._round_tasks: set[asyncio.Task[None]] = set()
        self._refusals_logged: set[tuple[str, str]] = set()
        self._restored = False
        self._stores = True
        self._applies: bool | None = None
        """In this round: whether the disk took the last vote; whether applying a set has worked, if it was tried."""
        self._silence = Silence(chain.db.path.with_name("silent"))
        self._timer_changed = asyncio.Event()
        self.phases = PhaseClock()

    # ---- in: messages and time ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Take up what the database says this peer had said in the current round."""
        if self._silence.begin():
            self._log("own votes may have been lost: nothing is said until two rounds have closed")
        self._restored = True
        self._run(self.participant.restore(*self._own_words(), time.monotonic()))

    def _own_words(self) -> tuple[list[Signed[Any]], list[VerifiedSet], Signed[Header] | None]:
        """What this peer has said where the head is: before a restart, or before it went to another branch and back."""
        head, db = self._chain.head, self._chain.db
        mine: list[Signed[Any]] = [
            unseal(raw, Proposal, Prevote, Precommit) for raw in db.own_votes(head.epoch, head.round)
        ]
        sets = [verify_set(decode(ProposedSet, data)) for data in db.sets(head.epoch, head.round)]
        raw = db.own_header(head.epoch, head.round)
        return mine, sets, None if raw is None else unseal(raw, Header)

    async def on_push(self, sender: str, raw: bytes) -> bytes:
        """A record pushed by another peer. Raises `RemoteError` at it when a check fails."""
        message: Signed[Any] = unseal(raw, *PUSHED, peer=sender)
        if isinstance(message.record, Start | Reset):
            self._events.received(sender, message)
            await self._on_opening(message)
            return b""
        outputs = self._take(message, sender)
        refused = next((output for output in outputs if isinstance(output, Refused)), None)
        error = None if refused is None else RemoteError(refused.check, refused.detail)
        self._events.received(sender, message, error)
        self._run(outputs)
        if error is not None:
            raise error
        return b""

    def take_claim(self, raw: bytes) -> None:
        """A claim found in the DHT; one that is old, of another run or broken is passed over in silence."""
        with contextlib.suppress(RemoteError):
            claim = unseal(raw, Claim)
            if claim.signer != self._identity.peer_id:
                outputs = self.participant.on_message(claim, time.monotonic())
                self._run([output for output in outputs if not isinstance(output, Refused)])

    def say(self, record: Header | Claim | Release) -> Signed[Any]:
        """Sign an own record, send it to everybody and take it ourselves; a header is stored first, once a round."""
        signed: Signed[Any] = seal(record, self._identity)
        if isinstance(record, Header):
            if self._silence.holds:
                raise UserError("own votes may have been lost, and what is said now might contradict them")
            raw = self._chain.db.put_own_header(record.epoch, record.round, signed.raw)
            signed = signed if raw == signed.raw else unseal(raw, Header)
        self._events.said(signed)
        self._outbox.send(self._everyone(), signed.raw)
        self._note_unreachable()
        self._run(self.participant.on_message(signed, time.monotonic()))
        return signed

    async def run_timer(self) -> None:
        """Call `on_tick` when the participant asks for it, for ever."""
        while True:
            deadline = self.participant.next_deadline
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                async with asyncio.timeout(wait):
                    await self._timer_changed.wait()
            except TimeoutError:
                self._note_unreachable()
                self._run(self.participant.on_tick(time.monotonic()))
            self._timer_changed.clear()

    async def moved(self, step: Step | None) -> None:
        """The chain's head has moved (under `advancing`): the participant begins the next round."""
        self._silence.moved()
        self.end_round()
        self.leftovers.moved()
        self._events.head(self._chain.head, step)
        words = self._own_words() if self._restored else ()  # nothing is said before `restore`
        self._run(self.participant.on_head(self._chain.head, time.monotonic(), *words))
        await self._on_head(step)

    def follows_few(self, step: Step) -> bool:
        """Whether a commit of a few for this round may be followed (SPEC 5.12)."""
        return self.participant.follows_few(given_up(step), time.monotonic())

    def wait_for_few(self) -> None:
        """Such a commit was offered: the wait for the others begins, if it has not."""
        self.participant.patience.hear(None, time.monotonic())
        self._timer_changed.set()

    async def close(self) -> None:
        """End all tasks."""
        self.end_round()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, message: Signed[Any], sender: str) -> list[rounds.Output]:
        self._outbox.heard_from(sender)
        self._note_unreachable()
        opened = None
        if isinstance(message.record, Proposal) and self.participant.expects(message):
            value = verify_set(message.record.value, peer=message.signer)
            opened = Opened(value, unseal_votes(message.record.polc, Prevote, peer=message.signer))
        return self.participant.on_message(message, time.monotonic(), opened=opened, sender=sender)

    def _note_unreachable(self) -> None:
        """Before the participant decides for whom to wait: what is known now."""
        self.participant.unreachable = self._outbox.unreachable

    def _on_unreachable(self) -> None:
        """Perhaps nobody is left to wait for."""
        if self._restored:
            self._note_unreachable()
            self._run(self.participant.on_tick(time.monotonic()))

    async def _on_opening(self, message: Signed[Start] | Signed[Reset]) -> None:
        async with self.advancing:
            if digest(message.record) == self._chain.head.epoch:
                return
            # To the end, also if the caller gives up: nobody would come to the state of a head half moved to.
            await to_the_end(self._open(self._chain.check(message.record.KIND, message.raw)))

    async def _open(self, step: Step) -> None:
        self._chain.append(step)
        self._outbox.send(self._everyone(), step.data)
        await self.moved(step)

    # ---- out: effects ------------------------------------------------------------------------------------------

    def _run(self, outputs: list[rounds.Output]) -> None:
        """Carry out outputs in order, and those that follow from them."""
        self._note_view()
        queue = list(outputs)
        while queue:
            queue.extend(self._effect(queue.pop(0)))
        self._timer_changed.set()
        self._note_view()
        self._note_phases()

    def _effect(self, output: rounds.Output) -> list[rounds.Output]:
        match output:
            case Say():
                return self._say_vote(output.record, output.proof)
            case Resend():
                for message in output.messages if self._can_vote else ():
                    self._outbox.send(self._everyone(), message.raw)
            case Fetch():
                self._start(self._fetch(output.header))
            case Apply():
                self._start(self._apply(output.value))
            case Committed():
                self._start(self._commit(output), ends_with_round=False)
            case Cut():
                self._events.cut(self._chain.head.round)
                self._on_cut(self._chain.head.round)
            case Behind():
                self._on_behind(output.peer)
            case Help():
                self._on_help(output.peer)
            case Refused():
                self._log_refusal(output)
            case RootsDiffer():
                self._log(
                    f"round {self._chain.head.round}: computed state root {output.mine.hex()[:16]}, most others "
                    f"{output.theirs.hex()[:16]}; computing it once more"
                )
                self._start(self._apply(output.value))
            case Relented():
                enough = output.leniency.name.lower()
                self._events.relented(self._chain.head.round, enough, output.waited_seconds)
            case Doubled():
                self._events.said_twice(output.first, output.second)
                who = output.first.signer
                self._log(f"{who} has said two different things in one place; the next commit takes its groups")
            case Halt():
                self._events.halted(self._chain.head.round, output.reason)
                self._log(output.reason)
            case Abstain():
                self._log(output.reason)
        return []

    @property
    def _can_vote(self) -> bool:
        """Who cannot help to close the round is not to be heard: the others could not go on without it (SPEC 5.12)."""
        return self._stores and self._applies is not False and not self._silence.holds

    def _log_refusal(self, refused: Refused) -> None:
        """Once a round for a member and a check: its sender is told each time, and anybody can send such records."""
        key = (refused.peer, refused.check)
        if self._chain.head.member(refused.peer) is not None and key not in self._refusals_logged:
            self._refusals_logged.add(key)
            self._log(f"refused a record of {refused.peer}: {refused.check}: {refused.detail}")

    def _say_vote(
        self, record: Proposal | Prevote | Precommit, proof: tuple[Signed[Prevote], ...]
    ) -> list[rounds.Output]:
        """Sign, store, then send: after a crash in between, the stored vote is the one that is sent.

        `proof`, the prevotes that justify a lock, goes to disk before the vote that takes it (SPEC 5.6).
        """
        if self._silence.holds:
            return []
        if self._applies is False:
            self._start(self._say_later(record, proof))
            return []
        place = record.value if isinstance(record, Proposal) else record
        value_id = digest(record.value) if isinstance(record, Proposal) else record.value
        known = self.participant.agreement.known_set(value_id) if value_id else None
        try:
            signed: Signed[Any] = seal(record, self._identity)
            if known is not None:
                self._chain.db.put_set(value_id, encode(known.value))
            for vote in proof:
                step = f"proof/{vote.signer}"
                self._chain.db.record_vote(place.epoch, place.round, vote.record.view, step, vote.raw)
            raw = self._chain.db.record_vote(place.epoch, place.round, record.view, record.KIND, signed.raw)
        except UserError as error:  # the disk is full, say: no vote without a record of it
            self._stores = False
            self._log(str(error))
            self._start(self._say_later(record, proof))
            return []
        self._stores = True
        if raw != signed.raw:
            signed = unseal(raw, Proposal, Prevote, Precommit)
        value: VerifiedSet | None = None
        if isinstance(signed.record, Proposal):
            value = verify_set(signed.record.value)
        self._events.said(signed)
        self._outbox.send(self._everyone(), signed.raw)
        return self.participant.on_said(signed, time.monotonic(), value)

    async def _say_later(self, record: Proposal | Prevote | Precommit, proof: tuple[Signed[Prevote], ...]) -> None:
        """A vote that could not be said yet: the round may not be able to close without it."""
        await asyncio.sleep(RETRY_SECONDS)
        if not self.participant.agreement.abstains:
            self._run(self._say_vote(record, proof))

    async def _fetch(self, header: Signed[Header]) -> None:
        """Get and check a contribution's blobs, as often as it takes while the round is open."""
        if not self._computes:
            return
        sections = [(header.signer, section) for section in header.record.sections]
        self.leftovers.note(section.blob for _, section in sections if self._syncer.lacks(section))
        seconds = self.participant.manifest.rounds.blob_seconds
        while True:
            try:
                with self.phases.during("transfer"):
                    await self._syncer.blobs(sections, time.monotonic() + max(seconds, RETRY_SECONDS))
                since = time.monotonic()
                with self.phases.during("check"):
                    verdict = await self._worker.check(header.signer, header.record.sections)
            except (NetworkError, UserError) as error:
                self._log(f"blobs of {header.signer}: {error}")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._events.checked(header, verdict, since)
                self._note_unreachable()
                self._run(self.participant.on_checked(header.id, verdict, time.monotonic()))
                return

    async def _apply(self, value: VerifiedSet) -> None:
        if not self._computes:
            return
        head = self.participant.head  # the round of this set, whatever the ledger learns meanwhile
        while True:
            try:
                since = time.monotonic()
                with self.phases.during("apply"):
                    root = await self._worker.apply(head.round, head.step, contributions(head, value))
            except UserError as error:
                self._applies = self._applies or False
                self._log(str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._applies = True
                self._events.applied(head.round, value.id, root, since)
                self._run(self.participant.on_applied(value.id, root, time.monotonic()))
                return

    async def _commit(self, output: Committed) -> None:
        """Have the new state on disk, store the commit, go on. Retries until the disk takes it."""
        commit = Commit(
            body=output.body, view=output.view, precommits=tuple(vote.raw for vote in output.precommits)
        )  # fmt: skip
        while True:
            try:
                async with self.advancing:
                    if self._chain.head.id != output.body.parent:
                        return  # catching up was faster
                    step = self._chain.check("commit", encode(commit))
                    agrees = not self._computes or await self._have_state(step)
                    self._chain.append(step)
                    if not agrees:
                        await self._take_agreed_state(step.after.round)
                    await self.moved(step)
                return
            except SpesError as error:
                self._log(f"round {output.body.round} is agreed on, but cannot be stored here yet: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _take_agreed_state(self, round_number: int) -> None:
        """The state that the others computed. The round is closed without it; the peer comes back to it."""
        try:
            await self._syncer.snapshot_at(round_number)
        except SpesError as error:
            self._log(f"the agreed state of round {round_number} is not here yet: {error}")

    async def _have_state(self, step: Step) -> bool:
        """S_{r+1} as agreed: ours if it has that root, else applied now. False if another root comes out."""
        assert step.value is not None
        for task in list(self._round_tasks):
            task.cancel()
        await self._worker.idle()  # it may be applying this very set, or an earlier one over the same file
        if self._syncer.has_state(step.after.round, step.after.state_root):
            return True
        head = step.before
        sections = [(h.signer, s) for h in step.value.headers for s in h.record.sections]
        await self._syncer.blobs(sections, time.monotonic() + self.participant.manifest.rounds.blob_seconds)
        with self.phases.during("apply"):
            root = await self._worker.apply(head.round, head.step, contributions(head, step.value))
        if root != step.after.state_root:
            self._log(
                f"computed state root {root.hex()[:16]} where the swarm agreed on {step.after.state_root.hex()[:16]}: "
                "this machine's arithmetic or memory may be at fault; fetching the agreed state"
            )
        return root == step.after.state_root

    # ---- tasks -------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None], *, ends_with_round: bool = True) -> None:
        task = asyncio.create_task(work)
        for group in (self._tasks, self._round_tasks) if ends_with_round else (self._tasks,):
            group.add(task)
            task.add_done_callback(group.discard)
        task.add_done_callback(self._report_failure)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"internal error: {type(error).__name__}: {error}")

    def end_round(self) -> None:
        """Cancel what was under way for a round that is over, or is no longer one of this ledger."""
        self._refusals_logged.clear()
        self._stores, self._applies = True, None
        for task in list(self._round_tasks):
            task.cancel()

    def _note_view(self) -> None:
        self._events.view(self.participant.head.round, self.participant.agreement.view)

    def _note_phases(self) -> None:
        participant = self.participant
        head, me = participant.head, participant.me
        runs = head.member(me) is not None and not head.ended and bool(head.electorate.owners)
        self.phases.set("wait", runs)
        self.phases.set("train", runs and me not in participant.headers)
        self.phases.set("agree", runs and participant.agreement.view >= 0)
