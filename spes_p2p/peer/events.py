"""The words of a peer's event log: one record for each thing that can happen, with a stable name and fields.

    recorder.py --Event--> plain --> store/events.py --> file --> parse --> Event --told--> a line for a person

Peer ids stand in full; digests are cut to 16 hexadecimal digits. A field with its default is not written. What peers
train on is in no event: neither text nor tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Names = Callable[[str], str]
"""How a peer id is shown to a person."""

DIGITS = 16
"""Hexadecimal digits of a digest."""

_PEER_FIELDS = ("peer", "to", "sender", "signer", "holder", "holders")


def short(digest: bytes) -> str:
    """A digest as events carry it; an empty one stays empty."""
    return digest.hex()[:DIGITS]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a peer."""

    NAME: ClassVar[str] = ""

    def told(self, names: Names) -> str:
        """What happened, for a person."""
        return self._told(names)

    @property
    def peers(self) -> tuple[str, ...]:
        """The other peers that it is about."""
        found: list[str] = []
        for name in _PEER_FIELDS:
            value = getattr(self, name, ())
            found += [value] if isinstance(value, str) else value
        return tuple(peer for peer in dict.fromkeys(found) if peer)

    def _told(self, names: Names) -> str:
        raise NotImplementedError


# ---- the process and its ledger --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The peer has begun."""

    NAME: ClassVar[str] = "start"
    role: str
    pid: int

    def _told(self, names: Names) -> str:
        return f"started as {self.role} (pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Stop(Event):
    """The peer ends, and knows it."""

    NAME: ClassVar[str] = "stop"
    reason: str = ""

    def _told(self, names: Names) -> str:
        return f"stopped{_because(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class HeadMoved(Event):
    """The ledger here ends with another record; `round` is the one that follows it.

    `how`: "start" (as it was on disk), "agreement", "opening" (a start or reset that was pushed), "catching up",
    "rollback". `view` is the view of our own commit.
    """

    NAME: ClassVar[str] = "head"
    round: int
    id: str
    epoch: str
    root: str
    how: str
    kind: str = ""
    view: int = -1
    counted: int = -1

    def _told(self, names: Names) -> str:
        what = f" ({self.kind}" + (f" of view {self.view}" if self.view >= 0 else "") + ")" if self.kind else ""
        counted = f", {self.counted} contributions counted" if self.counted >= 0 else ""
        return f"head before round {self.round}: {self.id}{what}, by {self.how}{counted}"


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A line for the person at the machine."""

    NAME: ClassVar[str] = "noted"
    line: str

    def _told(self, names: Names) -> str:
        return f"noted: {self.line}"


@dataclass(frozen=True, kw_only=True)
class Repeats(Event):
    """What happened again between two heads, and was not written each time."""

    NAME: ClassVar[str] = "repeats"
    sent: int = 0
    received: int = 0
    other: int = 0

    def _told(self, names: Names) -> str:
        parts = [(self.sent, "records sent again"), (self.received, "received again"), (self.other, "other repeats")]
        return ", ".join(f"{count} {what}" for count, what in parts if count)


# ---- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeaderMade(Event):
    """The own contribution is signed and stored."""

    NAME: ClassVar[str] = "header"
    round: int
    id: str
    tokens: int
    steps: int
    bytes: int

    def _told(self, names: Names) -> str:
        size = f"{self.bytes} bytes in blobs"
        return f"made its header {self.id} of round {self.round}: {self.steps} steps, {self.tokens} tokens, {size}"


@dataclass(frozen=True, kw_only=True)
class Said(Event):
    """An own vote or proposal is signed and stored; `value` "" is nil. Also other own records: claims, releases."""

    NAME: ClassVar[str] = "said"
    kind: str
    id: str
    round: int = -1
    view: int = -1
    value: str = ""
    root: str = ""

    def _told(self, names: Names) -> str:
        if self.view < 0:
            return f"said its {self.kind} {self.id}"
        root = f", root {self.root}" if self.root else ""
        return f"said its {self.kind} in view {self.view} of round {self.round}: {self.value or 'nil'}{root}"


@dataclass(frozen=True, kw_only=True)
class Sent(Event):
    """How pushing a record to a peer went, at its first try, at tries 2, 4, 8, ... and where that changed.

    `outcome`: "delivered", "refused" (the peer's check and words in `detail`), "failed" (the error), "dropped" (not
    tried, for the reason in `detail`). `seconds` is how long the last try took; it ended when this was written.
    """

    NAME: ClassVar[str] = "sent"
    to: str
    id: str
    kind: str
    outcome: str
    tries: int = 1
    seconds: float = 0.0
    detail: str = ""

    def _told(self, names: Names) -> str:
        tries = f" at try {self.tries}" if self.tries > 1 else ""
        lasted = f" after {self.seconds:.3f} s" if self.outcome != "dropped" else ""
        how = f"{self.outcome}{tries}{lasted}{_because(self.detail)}"
        return f"pushed {self.kind or 'record'} {self.id} to {names(self.to)}: {how}"


@dataclass(frozen=True, kw_only=True)
class Received(Event):
    """A record that a peer pushed to us, when it came first or was answered in another way than before.

    `check` is the check that it failed here, "" if it was taken; `here` is our round where that is not the record's;
    `path` is how we are connected to the sender, where that is known.
    """

    NAME: ClassVar[str] = "received"
    sender: str
    id: str
    kind: str = ""
    signer: str = ""
    round: int = -1
    view: int = -1
    value: str = ""
    check: str = ""
    detail: str = ""
    here: int = -1
    path: str = ""

    def _told(self, names: Names) -> str:
        what = f"{self.kind or 'record'} {self.id}"
        if self.view >= 0:
            what += f" in view {self.view}" + (f" for {self.value or 'nil'}" if self.kind != "proposal" else "")
        whose = f" of {names(self.signer)}" if self.signer and self.signer != self.sender else ""
        refused = f": refused, {self.check}{_because(self.detail)}" if self.check else ""
        here = f" (of round {self.round}, while at round {self.here})" if self.here >= 0 else ""
        return f"heard from {names(self.sender)}{_in(self.path)}: {what}{whose}{here}{refused}"


# ---- from collecting to the commit ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlobAsked(Event):
    """A blob is going to be fetched."""

    NAME: ClassVar[str] = "blob_asked"
    blob: str
    signer: str
    section: str
    bytes: int

    def _told(self, names: Names) -> str:
        what = f"{self.section} of {names(self.signer)}, {self.bytes} bytes"
        return f"fetches blob {self.blob} ({what})"


@dataclass(frozen=True, kw_only=True)
class BlobRefused(Event):
    """A holder did not give a blob, or not all of it."""

    NAME: ClassVar[str] = "blob_refused"
    blob: str
    holder: str
    reason: str

    def _told(self, names: Names) -> str:
        return f"did not get blob {self.blob} from {names(self.holder)}{_because(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class BlobCame(Event):
    """A blob is here and is the right one."""

    NAME: ClassVar[str] = "blob_came"
    blob: str
    signer: str
    holders: tuple[str, ...]
    bytes: int
    seconds: float

    def _told(self, names: Names) -> str:
        givers = ", ".join(map(names, self.holders)) or "an earlier try"
        return f"has blob {self.blob} of {names(self.signer)} from {givers}: {self.bytes} bytes in {self.seconds:.3f} s"


@dataclass(frozen=True, kw_only=True)
class BlobFailed(Event):
    """Nobody gave a blob; it is tried again while the round is open."""

    NAME: ClassVar[str] = "blob_failed"
    blob: str
    signer: str
    seconds: float
    reason: str

    def _told(self, names: Names) -> str:
        return f"gave up blob {self.blob} of {names(self.signer)} after {self.seconds:.3f} s{_because(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class Checked(Event):
    """A contribution's blobs were judged; `check` "" is good."""

    NAME: ClassVar[str] = "checked"
    header: str
    signer: str
    round: int
    seconds: float
    check: str = ""

    def _told(self, names: Names) -> str:
        verdict = f"fails {self.check}" if self.check else "good"
        return f"checked the contribution of {names(self.signer)}: {verdict} (in {self.seconds:.3f} s)"


@dataclass(frozen=True, kw_only=True)
class CutShort(Event):
    """Enough others are done: our trainer publishes after the step in hand."""

    NAME: ClassVar[str] = "cut"
    round: int

    def _told(self, names: Names) -> str:
        return f"cuts its training of round {self.round} short"


@dataclass(frozen=True, kw_only=True)
class ViewBegun(Event):
    """The agreement is in another view; `why` tells what did not come in the one before."""

    NAME: ClassVar[str] = "view"
    round: int
    view: int
    why: str

    def _told(self, names: Names) -> str:
        return f"begins view {self.view} of round {self.round}{_because(self.why)}"


@dataclass(frozen=True, kw_only=True)
class Relented(Event):
    """After waiting so long we agree that fewer than a quorum close the round: `enough` is "majority" or "any"."""

    NAME: ClassVar[str] = "relented"
    round: int
    enough: str
    seconds: float

    def _told(self, names: Names) -> str:
        if self.enough == "any":
            may = "most owners are gone; whoever is here may go on, and goes back if the others went on too"
        else:
            may = "owners of more than half of the groups may go on without the others"
        return f"round {self.round}: no commit for {self.seconds:.0f} s; {may}"


@dataclass(frozen=True, kw_only=True)
class SaidTwice(Event):
    """Two different votes of one signer in one place came, for these sets; the next commit takes its groups."""

    NAME: ClassVar[str] = "said_twice"
    signer: str
    kind: str
    round: int
    view: int
    first: str = ""
    second: str = ""

    def _told(self, names: Names) -> str:
        place = f"its {self.kind} in view {self.view} of round {self.round}"
        return f"heard {names(self.signer)} contradict itself in {place}: {self.first or 'nil'}, {self.second or 'nil'}"


@dataclass(frozen=True, kw_only=True)
class Halted(Event):
    """No root can win: the run stands here until the organizer resets it."""

    NAME: ClassVar[str] = "halted"
    round: int
    reason: str

    def _told(self, names: Names) -> str:
        return f"halted in round {self.round}{_because(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class Applied(Event):
    """A set was applied to the state."""

    NAME: ClassVar[str] = "applied"
    round: int
    value: str
    root: str
    seconds: float

    def _told(self, names: Names) -> str:
        return f"applied set {self.value} of round {self.round}: root {self.root} (in {self.seconds:.3f} s)"


# ---- snapshots -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SnapshotBegun(Event):
    """The global state of a round is going to be fetched, as far as it is not here; `state` is that round."""

    NAME: ClassVar[str] = "snapshot_begun"
    state: int
    bytes: int
    holders: tuple[str, ...]

    def _told(self, names: Names) -> str:
        givers = ", ".join(map(names, self.holders))
        return f"fetches the state of round {self.state}: {self.bytes} bytes from {givers or 'nobody'}"


@dataclass(frozen=True, kw_only=True)
class SnapshotDone(Event):
    """That has ended after `bytes` more were here: the state is whole and right, or `reason` tells why it is not."""

    NAME: ClassVar[str] = "snapshot_done"
    state: int
    bytes: int
    seconds: float
    reason: str = ""

    def _told(self, names: Names) -> str:
        how = "gave up" if self.reason else "has"
        size = f"{self.bytes} bytes in {self.seconds:.3f} s"
        return f"{how} the state of round {self.state}: {size}{_because(self.reason)}"


@dataclass(frozen=True, kw_only=True)
class HolderDropped(Event):
    """A holder of a snapshot failed, stalled or lied, and is not asked for it again."""

    NAME: ClassVar[str] = "holder_dropped"
    state: int
    holder: str
    reason: str

    def _told(self, names: Names) -> str:
        return f"asks {names(self.holder)} no more for the state of round {self.state}{_because(self.reason)}"


# ---- trainer, network ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerStarted(Event):
    """The trainer is ready."""

    NAME: ClassVar[str] = "trainer_started"
    pid: int
    device: str

    def _told(self, names: Names) -> str:
        return f"trainer ready on {self.device} (pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class TrainerEnded(Event):
    """The trainer's process is gone."""

    NAME: ClassVar[str] = "trainer_ended"
    code: int
    problem: str

    def _told(self, names: Names) -> str:
        return f"trainer ended with code {self.code}{_because(self.problem)}"


@dataclass(frozen=True, kw_only=True)
class Training(Event):
    """The trainer was told to train a round."""

    NAME: ClassVar[str] = "training"
    round: int
    steps: int

    def _told(self, names: Names) -> str:
        return f"trains round {self.round}: {self.steps} steps"


@dataclass(frozen=True, kw_only=True)
class Trained(Event):
    """The trainer is done with a round."""

    NAME: ClassVar[str] = "trained"
    round: int
    steps: int
    seconds: float

    def _told(self, names: Names) -> str:
        return f"trained round {self.round}: {self.steps} steps in {self.seconds:.3f} s"


@dataclass(frozen=True, kw_only=True)
class Link(Event):
    """A connection came up, changed or went; `path` is "direct", "relayed" or "down"."""

    NAME: ClassVar[str] = "link"
    peer: str
    path: str

    def _told(self, names: Names) -> str:
        how = "lost its connection to" if self.path == "down" else f"has a {self.path} connection to"
        return f"{how} {names(self.peer)}"


@dataclass(frozen=True, kw_only=True)
class Contact(Event):
    """What is known of a peer has changed. `what`: "new", "moved", "forgotten", "silent" (a hello had no answer)."""

    NAME: ClassVar[str] = "contact"
    peer: str
    what: str
    role: str = ""
    addresses: tuple[str, ...] = ()
    tries: int = 1
    reason: str = ""

    def _told(self, names: Names) -> str:
        if self.what == "silent":
            return f"hello to {names(self.peer)} had no answer, {self.tries} in a row{_because(self.reason)}"
        at = f" at {', '.join(self.addresses)}" if self.addresses else ""
        word = {"new": "knows", "moved": "has other addresses of"}.get(self.what, self.what)
        return f"{word} {names(self.peer)}{_in(self.role)}{at}"


VOCABULARY: dict[str, type[Event]] = {kind.NAME: kind for kind in Event.__subclasses__()}


def plain(event: Event) -> dict[str, Any]:
    """The fields of an event as its line carries them: those that differ from their defaults."""
    pairs = ((field, getattr(event, field.name)) for field in dataclasses.fields(event))
    return {field.name: value for field, value in pairs if value != field.default}


def parse(name: str, fields: Mapping[str, Any]) -> Event | None:
    """The event that a line says; None for a name that is not known, or fields of other types."""
    kind = VOCABULARY.get(name)
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for field, wanted in _types(name).items():
        if field not in fields:
            continue
        value = fields[field]
        if wanted == tuple[str, ...] and isinstance(value, list):
            values[field] = tuple(value)
        elif wanted is float and type(value) in (int, float):
            values[field] = float(value)
        elif type(value) is wanted:
            values[field] = value
        else:
            return None
    try:
        return kind(**values)
    except TypeError:  # one without a default is missing
        return None


@functools.cache
def _types(name: str) -> dict[str, Any]:
    kind = VOCABULARY[name]
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _in(word: str) -> str:
    return f" ({word})" if word else ""
