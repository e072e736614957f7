"""What the parts of a peer call when something happens; it leaves out repeats and words the rest as events.

    shell, outbox, sync, contacts, trainer_link --a call--> Recorder --Event--> EventLog

The protocol repeats what may have been lost, and strangers may repeat what they like. So the first time counts, then
what changes, then tries 2, 4, 8, ...; the rest is counted, and the count is written once a round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spes_p2p.core.head import Head
from spes_p2p.core.ladder import Verdict
from spes_p2p.peer import events
from spes_p2p.peer.events import Event, plain, short
from spes_p2p.store.chain import Step
from spes_p2p.store.events import EventLog
from spes_protocols import control_pb2
from spes_protocols.codec import decode, digest, sha256
from spes_protocols.errors import RemoteError, SpesError, printable
from spes_protocols.messages import Header, Precommit, Presence, Prevote, Proposal, Sealed, Section, Signed

REMEMBERED_MAX = 8192
"""Of so many records and peers it is known what was written about them; the oldest is forgotten first."""

STRANGE_LINES_MAX = 256
"""Lines about what one peer pushes, from one head to the next or within an hour; more are counted only."""

HOUR_SECONDS = 3600.0
TEXT_MAX = 200
HOLDERS_MAX = 16
NOTE_SECONDS = 60.0


class _Tries:
    """How often something was tried, and what came of it last."""

    def __init__(self) -> None:
        self.count = 0
        self.outcome = ""

    def differs(self, outcome: str) -> bool:
        """Count another try; whether it is worth a line."""
        self.count += 1
        changed, self.outcome = outcome != self.outcome, outcome
        return changed or (outcome != "delivered" and self.count & (self.count - 1) == 0)


class Recorder:
    """Writes events through `write` (name, fields), such as `EventLog.write`."""

    def __init__(self, write: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._write = write
        self._round = -1
        self._head = ""
        self._view = (-1, -1)
        self._sent: dict[tuple[str, str], _Tries] = {}
        self._received: dict[tuple[str, str], str] = {}
        self._lines: dict[str, int] = {}
        self._since = time.monotonic()
        self._kinds: dict[str, str] = {}
        self._heard: dict[int, _Heard] = {}
        self._links: dict[str, str] = {}
        self._silent: dict[str, _Tries] = {}
        self._noted: dict[str, float] = {}
        self._repeats = {"sent": 0, "received": 0, "other": 0}

    # ---- the process and its ledger ----------------------------------------------------------------------------

    def started(self, role: str, head: Head) -> None:
        """The peer has begun, with this head on disk."""
        self._put(events.Start(role=role, pid=os.getpid()))
        self._move(head, "start")

    def stopped(self, failure: SpesError | None) -> None:
        """The peer ends."""
        self._tell_repeats()
        self._put(events.Stop(reason=_text(failure)))

    def head(self, head: Head, step: Step | None) -> None:
        """The ledger moved on: by our own commit, by an opening, or (`step` None) by what others had."""
        if short(head.id) == self._head:
            return
        self._tell_repeats()
        if step is None:
            self._move(head, "rollback" if head.round <= self._round else "catching up")
        elif step.commit is not None:
            counted = len(step.value.headers) if step.value is not None else -1
            self._move(head, "agreement", kind="commit", view=step.commit.view, counted=counted)
        else:
            self._move(head, "opening", kind=step.opening.record.KIND if step.opening is not None else "")
        self._sent.clear()
        self._received.clear()
        self._forget_strangers()

    def noted(self, line: str) -> None:
        """A line for the person at the machine; the same one at most once a minute."""
        line, now = _text(line), time.monotonic()
        if now - self._noted.get(line, -1e9) < NOTE_SECONDS:
            self._repeats["other"] += 1
            return
        self._noted[line] = now
        _bound(self._noted, 64)
        self._put(events.Noted(line=line))

    def _move(self, head: Head, how: str, **more: Any) -> None:
        self._round, self._head, self._view = head.round, short(head.id), (head.round, -1)
        self._heard.clear()
        self._put(
            events.HeadMoved(
                round=head.round,
                id=short(head.id),
                epoch=short(head.epoch),
                root=short(head.state_root),
                how=how,
                **more,
            )
        )

    def _tell_repeats(self) -> None:
        if any(self._repeats.values()):
            self._put(events.Repeats(**self._repeats))
            self._repeats = dict.fromkeys(self._repeats, 0)

    # ---- records -----------------------------------------------------------------------------------------------

    def said(self, signed: Signed[Any]) -> None:
        """An own record is signed and stored."""
        record, name = signed.record, self._name(signed)
        if isinstance(record, Header):
            size = sum(section.size for section in record.sections)
            self._put(
                events.HeaderMade(round=record.round, id=name, tokens=record.tokens, steps=record.steps, bytes=size)
            )
            return
        known = self._received.get(("", name))
        self._received[("", name)] = ""
        if known is not None:
            self._repeats["other"] += 1  # a claim is made again and again, to the letter
            return
        number, view, value = _place(record)
        root = short(record.state_root) if isinstance(record, Precommit) else ""
        if view >= 0:
            self._heard_in(view).own(record.KIND, value)
        self._put(events.Said(kind=record.KIND, id=name, round=number, view=view, value=value, root=root))

    def sent(self, peer: str, raw: bytes, since: float, error: SpesError | None = None) -> None:
        """A push to a peer that began at `since` (monotonic seconds) has ended."""
        outcome = "delivered" if error is None else "refused" if isinstance(error, RemoteError) else "failed"
        self._sent_as(peer, raw, outcome, time.monotonic() - since, _text(error))

    def dropped(self, peer: str, raw: bytes, reason: str) -> None:
        """A record for a peer was not tried."""
        self._sent_as(peer, raw, "dropped", 0.0, reason)

    def received(self, sender: str, signed: Signed[Any], error: RemoteError | None = None) -> None:
        """A record was pushed to us, and is taken unless `error` is what we answer."""
        record, name = signed.record, self._name(signed)
        check = error.check if error is not None else ""
        if not self._is_worth_a_line(sender, name, check):
            return
        number, view, value = _place(record)
        if not check and view >= 0 and number == self._round:
            self._heard_in(view).other(record.KIND, value)
        here = self._round if number not in (-1, self._round) else -1
        self._put(
            events.Received(
                sender=sender, id=name, kind=record.KIND, signer=signed.signer, round=number, view=view, value=value,
                check=check, detail=_text(error.detail) if error else "", here=here, path=self._links.get(sender, ""),
            )
        )  # fmt: skip

    def turned_away(self, sender: str, raw: bytes, error: RemoteError) -> None:
        """What a peer pushed was refused before anything was known of it: we are busy, or it is no signed record."""
        name = short(sha256(raw))
        if self._received.get((sender, name)) != error.check and self._is_worth_a_line(sender, name, error.check):
            path = self._links.get(sender, "")
            self._put(
                events.Received(
                    sender=sender, id=name, kind=self._kinds.get(name, ""), check=error.check,
                    detail=_text(error.detail), path=path,
                )
            )  # fmt: skip

    def _sent_as(self, peer: str, raw: bytes, outcome: str, seconds: float, detail: str) -> None:
        name = short(sha256(raw))
        tries = self._sent.setdefault((peer, name), _Tries())
        _bound(self._sent, REMEMBERED_MAX)
        if not tries.differs(outcome):
            self._repeats["sent"] += 1
            return
        kind = self._kinds.get(name) or _kind(raw)
        self._put(
            events.Sent(
                to=peer,
                id=name,
                kind=kind,
                outcome=outcome,
                tries=tries.count,
                seconds=round(seconds, 6),
                detail=detail,
            )
        )

    def _is_worth_a_line(self, sender: str, name: str, check: str) -> bool:
        if time.monotonic() - self._since > HOUR_SECONDS:
            self._forget_strangers()
        key = (sender, name)
        known = self._received.get(key)
        self._received[key] = check
        _bound(self._received, REMEMBERED_MAX)
        if known == check or self._lines.get(sender, 0) >= STRANGE_LINES_MAX:
            self._repeats["received"] += 1
            return False
        self._lines[sender] = self._lines.get(sender, 0) + 1
        _bound(self._lines, REMEMBERED_MAX)
        return True

    def _forget_strangers(self) -> None:
        self._lines.clear()
        self._since = time.monotonic()

    def _name(self, signed: Signed[Any]) -> str:
        name = short(signed.id)
        self._kinds[name] = signed.record.KIND
        _bound(self._kinds, REMEMBERED_MAX)
        return name

    # ---- from collecting to the commit -------------------------------------------------------------------------

    def blob_asked(self, section: Section, signer: str) -> None:
        """A blob is going to be fetched."""
        self._put(events.BlobAsked(blob=short(section.blob), signer=signer, section=section.name, bytes=section.size))

    def blob_refused(self, section: Section, holder: str, reason: str) -> None:
        """A holder did not give a blob."""
        self._put(events.BlobRefused(blob=short(section.blob), holder=holder, reason=_text(reason)))

    def blob_came(self, section: Section, signer: str, holders: Sequence[str], since: float) -> None:
        """A blob is here and right; its transfer began at `since` (monotonic seconds)."""
        self._put(
            events.BlobCame(
                blob=short(section.blob), signer=signer, holders=tuple(holders[:HOLDERS_MAX]), bytes=section.size,
                seconds=_seconds(since),
            )
        )  # fmt: skip

    def blob_failed(self, section: Section, signer: str, since: float, error: SpesError) -> None:
        """Nobody gave a blob."""
        self._put(
            events.BlobFailed(blob=short(section.blob), signer=signer, seconds=_seconds(since), reason=_text(error))
        )

    def checked(self, header: Signed[Header], verdict: Verdict, since: float) -> None:
        """A contribution's blobs were judged."""
        self._put(
            events.Checked(
                header=self._name(header), signer=header.signer, round=header.record.round, seconds=_seconds(since),
                check=verdict.check or "",
            )
        )  # fmt: skip

    def cut(self, round_number: int) -> None:
        """Our training is cut short."""
        self._put(events.CutShort(round=round_number))

    def view(self, round_number: int, view: int) -> None:
        """The agreement stands in this view, as it did before or not."""
        if view < 0 or (round_number, view) == self._view or round_number != self._round:
            return
        before = self._view[1]
        self._view = (round_number, view)
        self._put(events.ViewBegun(round=round_number, view=view, why=self._why(before, view)))

    def relented(self, round_number: int, enough: str, waited_seconds: float) -> None:
        """We agree that fewer than a quorum close the round."""
        self._put(events.Relented(round=round_number, enough=enough, seconds=round(waited_seconds, 3)))

    def said_twice(self, first: Signed[Any], second: Signed[Any]) -> None:
        """A signer contradicted itself."""
        number, view, value = _place(first.record)
        self._put(
            events.SaidTwice(
                signer=first.signer, kind=first.record.KIND, round=number, view=view, first=value,
                second=_place(second.record)[2],
            )
        )  # fmt: skip

    def halted(self, round_number: int, reason: str) -> None:
        """Only the organizer can make the run go on."""
        self._put(events.Halted(round=round_number, reason=_text(reason)))

    def applied(self, round_number: int, value_id: bytes, root: bytes, since: float) -> None:
        """A set was applied."""
        self._put(events.Applied(round=round_number, value=short(value_id), root=short(root), seconds=_seconds(since)))

    def _why(self, before: int, view: int) -> str:
        heard = self._heard.get(view)
        if heard is not None and heard.others:
            return "others are in it" if before >= 0 or not heard.proposals else "its proposal is there"
        return "the headers are in, or their time is over" if before < 0 else self._heard_in(before).lacks()

    def _heard_in(self, view: int) -> _Heard:
        heard = self._heard.setdefault(view, _Heard())
        _bound(self._heard, 256)
        return heard

    # ---- snapshots ---------------------------------------------------------------------------------------------

    def snapshot_begun(self, state: int, size: int, holders: Sequence[str]) -> None:
        """So many bytes of a round's state are going to be fetched."""
        self._put(events.SnapshotBegun(state=state, bytes=size, holders=tuple(holders[:HOLDERS_MAX])))

    def snapshot_done(self, state: int, size: int, since: float, reason: str = "") -> None:
        """So many bytes of it came; that began at `since` (monotonic seconds), and failed if there is a reason."""
        self._put(events.SnapshotDone(state=state, bytes=size, seconds=_seconds(since), reason=_text(reason)))

    def holder_dropped(self, state: int, holder: str, error: SpesError) -> None:
        """A holder of a snapshot is not asked again."""
        self._put(events.HolderDropped(state=state, holder=holder, reason=_text(error)))

    # ---- trainer, network --------------------------------------------------------------------------------------

    def trainer_started(self, ready: control_pb2.Ready) -> None:
        """The trainer is ready."""
        self._put(events.TrainerStarted(pid=ready.pid, device=_text(ready.device or "cpu")))

    def trainer_ended(self, code: int, problem: str) -> None:
        """The trainer's process is gone."""
        self._put(events.TrainerEnded(code=code, problem=_text(problem)))

    def training(self, task: control_pb2.TrainRound) -> None:
        """The trainer was told to train a round."""
        self._put(events.Training(round=task.round, steps=task.steps))

    def trained(self, done: control_pb2.RoundDone) -> None:
        """The trainer is done with a round."""
        self._put(events.Trained(round=done.round, steps=done.steps, seconds=round(done.train_seconds, 6)))

    def links(self, now: Mapping[str, str]) -> None:
        """All connections as they are: "direct" or "relayed" for each peer."""
        for peer in sorted(self._links.keys() | now.keys()):
            path = now.get(peer, "down")
            if self._links.get(peer, "down") != path:
                self._put(events.Link(peer=peer, path=path))
        self._links = dict(now)

    def presence(self, peer: str, before: Presence | None, now: Presence) -> None:
        """A presence was heard, after this one or none."""
        if before is None or set(before.addresses) != set(now.addresses) or before.role != now.role:
            what = "new" if before is None else "moved"
            addresses = tuple(_text(address) for address in now.addresses[:HOLDERS_MAX])
            self._put(events.Contact(peer=peer, what=what, role=now.role, addresses=addresses))

    def hello(self, peer: str, error: SpesError | None = None) -> None:
        """A peer answered our hello, or did not."""
        if error is None:
            self._silent.pop(peer, None)
            return
        tries = self._silent.setdefault(peer, _Tries())
        _bound(self._silent, REMEMBERED_MAX)
        if tries.differs("silent"):
            self._put(events.Contact(peer=peer, what="silent", tries=tries.count, reason=_text(error)))
        else:
            self._repeats["other"] += 1

    def forgot(self, peer: str) -> None:
        """A peer was forgotten to make room."""
        self._put(events.Contact(peer=peer, what="forgotten"))

    def _put(self, event: Event) -> None:
        self._write(event.NAME, plain(event))


class _Heard:
    """What was heard in one view, to say what it lacked."""

    def __init__(self) -> None:
        self.proposals = 0
        self.others = 0
        self._votes: dict[tuple[str, str], int] = {}
        self._precommitted = False

    def own(self, kind: str, value: str) -> None:
        self._add(kind, value)
        self._precommitted = self._precommitted or (kind == Precommit.KIND and value != "")

    def other(self, kind: str, value: str) -> None:
        self.others += 1
        self._add(kind, value)

    def _add(self, kind: str, value: str) -> None:
        if kind == Proposal.KIND:
            self.proposals += 1
        elif len(self._votes) < 16 or (kind, value) in self._votes:
            self._votes[(kind, value)] = self._votes.get((kind, value), 0) + 1

    def lacks(self) -> str:
        """Why a view that nobody left early led nowhere."""
        if self._precommitted:
            problem = "no quorum of precommits for one root in time"
        else:
            problem = "no quorum of prevotes for its proposal in time" if self.proposals else "no proposal in time"
        told = ", ".join(f"{n} {kind}s for {value[:6] or 'nil'}" for (kind, value), n in sorted(self._votes.items()))
        return f"{problem} ({told or 'no votes heard'})"


SILENT = Recorder(lambda name, fields: None)
"""For whoever keeps no log."""


def recorder(log: EventLog) -> Recorder:
    """A recorder that writes to a log."""
    return Recorder(log.write)


def _place(record: Any) -> tuple[int, int, str]:
    """(round, view, short id of the set) of a record; -1 and "" for what it does not have."""
    if isinstance(record, Proposal):
        return record.value.round, record.view, short(digest(record.value))
    if isinstance(record, Prevote | Precommit):
        return record.round, record.view, short(record.value)
    return getattr(record, "round", -1), -1, ""


def _kind(raw: bytes) -> str:
    try:
        return decode(Sealed, raw).kind
    except RemoteError:
        return ""


def _text(value: object) -> str:
    return "" if value is None else printable(str(value), TEXT_MAX)


def _seconds(since: float) -> float:
    return round(time.monotonic() - since, 6)


def _bound(table: dict[Any, Any], size: int) -> None:
    """Let go of the oldest entries of a table that has grown beyond its size."""
    while len(table) > size:
        del table[next(iter(table))]
