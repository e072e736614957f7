"""Why somebody has not got what somebody else made: the answer in sentences, from the timeline of a round.

what:PEER --its maker's pushes, each other peer's receipts and transfers--> Answer: one Fate for each other peer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spes_client.timeline import Moment, Timeline
from spes_p2p.peer.events import (
    BlobAsked,
    BlobCame,
    BlobFailed,
    BlobRefused,
    Contact,
    CutShort,
    Event,
    HeaderMade,
    HeadMoved,
    Noted,
    Received,
    Said,
    Sent,
    Start,
    Stop,
    Trained,
    TrainerEnded,
    Training,
    ViewBegun,
)

KINDS = {"header": ("header",), "proposal": ("proposal",), "vote": ("prevote", "precommit"), "blob": ()}
"""What can be asked for, and the kinds of records that it means."""

_CLUES = {
    "header": (HeadMoved, Start, Stop, Training, Trained, TrainerEnded, CutShort, Noted),
    "proposal": (HeadMoved, Start, Stop, ViewBegun, Noted),
    "vote": (HeadMoved, Start, Stop, ViewBegun, Noted),
}
_CLUES_MAX = 6
_REASONS_MAX = 4
_SILENCE_SECONDS = 1.0

_HOLLOW = ("it could not be reached a moment ago", "the record before it could not be pushed")
"""Reasons that only point at a failure before them."""

Names = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of one thing on its way to one peer. `reached` is in seconds since the round's head, None: never."""

    peer: str
    reached: float | None
    told: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """About one record, or all blobs of one contribution: how it came about, and its fate with each peer."""

    thing: str
    made: str
    fates: tuple[Fate, ...]

    def sentences(self) -> list[str]:
        """The whole in a few sentences, those who have it first."""
        reached = sorted((f for f in self.fates if f.reached is not None), key=lambda fate: fate.reached or 0.0)
        told = [self.made]
        if reached:
            told.append(f"It reached {', '.join(fate.told for fate in reached)}.")
        return told + [fate.told for fate in self.fates if fate.reached is None]


def why(timeline: Timeline, what: str, maker: str, names: Names, to: str | None = None) -> list[Answer]:
    """Whom a peer's header, proposals, votes or blobs of the round reached, and what went wrong on the way."""
    asked = _Case(timeline, what, maker, names)
    others = [to] if to is not None else asked.others()
    if what == "blob":
        return asked.blobs(others)
    ids = list(dict.fromkeys(asked.ids()))
    return [asked.record(name, others) for name in ids] or [asked.nothing()]


class _Case:
    """One question about one maker."""

    def __init__(self, timeline: Timeline, what: str, maker: str, names: Names) -> None:
        self._timeline = timeline
        self._what = what
        self._kinds = KINDS[what]
        self._maker = maker
        self._names = names
        self._me = names(maker)
        self._has_log = maker in timeline.peers

    def others(self) -> list[str]:
        """All whom it could have reached: those with logs, and those it was pushed to."""
        pushed = [m.event.to for m in self._of(self._maker) if isinstance(m.event, Sent)]
        return [peer for peer in dict.fromkeys([*self._timeline.peers, *pushed]) if peer != self._maker]

    def ids(self) -> list[str]:
        """Records of the asked kind by the maker, as it or anybody else tells."""
        found = []
        for moment in self._timeline.moments:
            event = moment.event
            own = moment.peer == self._maker and self._is_asked(event)
            heard = isinstance(event, Received) and event.signer == self._maker and event.kind in self._kinds
            if own or heard:
                assert isinstance(event, HeaderMade | Said | Received)
                found.append(event.id)
        return found

    def _is_asked(self, event: Event) -> bool:
        made_header = isinstance(event, HeaderMade) and "header" in self._kinds
        return made_header or (isinstance(event, Said) and event.kind in self._kinds)

    # ---- records -----------------------------------------------------------------------------------------------

    def record(self, name: str, others: Sequence[str]) -> Answer:
        """What became of one record."""
        moments = [m for m in self._timeline.moments if getattr(m.event, "id", None) == name]
        made = next((m for m in moments if m.peer == self._maker and self._is_asked(m.event)), None)
        thing = self._thing(name, moments)
        if made is not None:
            how = f"{self._me} made {thing} {self._at(made)}."
        else:
            first = next(m for m in moments if isinstance(m.event, Received))
            lacks = "does not tell when" if self._has_log else "is not here"
            how = f"The log of {self._me}, which made {thing}, {lacks}; it was first heard of {self._at(first)}."
        since = made.at if made is not None else moments[0].at
        return Answer(thing=thing, made=how, fates=tuple(self._fate(peer, thing, moments, since) for peer in others))

    def _thing(self, name: str, moments: Sequence[Moment]) -> str:
        event = next(m.event for m in moments if isinstance(m.event, HeaderMade | Said | Received))
        kind = "header" if isinstance(event, HeaderMade) else event.kind
        view = "" if isinstance(event, HeaderMade) or event.view < 0 else f" in view {event.view}"
        vote = f" for {event.value or 'nil'}" if not isinstance(event, HeaderMade) and kind in KINDS["vote"] else ""
        return f"its {kind} of round {self._timeline.round}{view}{vote} ({name[:8]})"

    def _fate(self, peer: str, thing: str, moments: Sequence[Moment], since: float) -> Fate:
        who = self._names(peer)
        heard = [m for m in moments if m.peer == peer and isinstance(m.event, Received)]
        taken = next((m for m in heard if isinstance(m.event, Received) and not m.event.check), None)
        pushes = [m for m in moments if m.peer == self._maker and isinstance(m.event, Sent) and m.event.to == peer]
        if taken is not None:
            told = f"{who} after {taken.at - since:.3f} s{self._although(taken, pushes)}"
            return Fate(peer=peer, reached=self._timeline.seconds(taken), told=told)
        if heard:
            last = heard[-1].event
            assert isinstance(last, Received)
            reason = f": {last.detail}" if last.detail else ""
            told = f"{who} refused it {self._at(heard[-1])} ({last.check}{reason})."
            return Fate(peer=peer, reached=None, told=told)
        has_log = peer in self._timeline.peers
        last_push = pushes[-1].event if pushes else None
        if isinstance(last_push, Sent) and last_push.outcome == "delivered":
            arrived = self._timeline.seconds(pushes[-1]) + last_push.seconds
            if not has_log:
                told = f"{who} after at most {pushes[-1].at + last_push.seconds - since:.3f} s (its log is not here)"
                return Fate(peer=peer, reached=arrived, told=told)
            told = f"{who} took it, as {self._me} tells, but its own log does not show that{self._lost()}."
            return Fate(peer=peer, reached=None, told=told)
        told = f"{who} never received it: {self._pushed(peer, pushes, since)}.{self._state(peer, since)}"
        if not has_log:
            told = f"{who} did not get it, as far as is known: {self._pushed(peer, pushes, since)}."
        return Fate(peer=peer, reached=None, told=told)

    def _although(self, taken: Moment, pushes: Sequence[Moment]) -> str:
        """What was wrong with a record that came: that it came late, or only after failures."""
        assert isinstance(taken.event, Received)
        failed = [m.event for m in pushes if isinstance(m.event, Sent) and m.event.outcome != "delivered"]
        parts = [f"then at round {taken.event.here}"] if taken.event.here >= 0 else []
        if failed:
            parts.append(f"before that {failed[-1].outcome}: {self._reason(failed[-1].detail)}")
            parts += self._root(failed[-1].to, [failed[-1].detail], taken.at)
        return f" ({'; '.join(parts)})" if parts else ""

    def _pushed(self, peer: str, pushes: Sequence[Moment], since: float) -> str:
        if not self._has_log:
            return f"whether it was pushed is not known, as the log of {self._me} is not here"
        tries = [m for m in pushes if isinstance(m.event, Sent) and m.event.outcome != "dropped"]
        if tries:
            last = tries[-1].event
            assert isinstance(last, Sent)
            count = f"{last.tries} pushes" if last.tries > 1 else "one push"
            details = [m.event.detail for m in tries if isinstance(m.event, Sent) and m.event.outcome == last.outcome]
            reasons = "; then ".join(self._reason(detail) for detail in list(dict.fromkeys(details))[:_REASONS_MAX])
            reasons = "; ".join([reasons, *self._root(peer, details, tries[0].at)])
            return f"{count} {last.outcome}, the last one told of {self._at(tries[-1])} ({reasons})"
        if pushes:
            dropped = pushes[-1].event
            assert isinstance(dropped, Sent)
            not_tried = f"it was not tried {self._at(pushes[-1])}: {self._reason(dropped.detail)}"
            return "; ".join([not_tried, *self._root(peer, [dropped.detail], pushes[-1].at)])
        silent = [m for m in self._of(self._maker) if isinstance(m.event, Contact) and m.event.peer == peer]
        if silent:
            return f"it was not pushed there; {self._at(silent[-1])} {self._me} noted: {self._told(silent[-1])}"
        return (
            f"{self._me} pushed nothing of it there, so it did not count {self._names(peer)} among those who are "
            f"there; {self._last_sign(peer, since)}"
        )

    def _root(self, peer: str, details: Sequence[str], until: float) -> list[str]:
        """Why the first push or hello to a peer failed, where `details` only say that something before had."""
        if not all(any(hollow in detail for hollow in _HOLLOW) for detail in details):
            return []
        first: Moment | None = None
        for moment in self._timeline.around:
            event = moment.event
            if moment.peer != self._maker or moment.at > until or peer not in event.peers:
                continue
            if isinstance(event, Sent) and event.outcome == "delivered":
                first = None
            elif first is None and _own_reason(event):
                first = moment
        if first is None:
            return ["what had failed first is not in its log of this round"]
        what = f"push of a {first.event.kind or 'record'}" if isinstance(first.event, Sent) else "hello"
        return [f"first a {what} had failed {self._at(first)}: {self._reason(_own_reason(first.event))}"]

    def _last_sign(self, peer: str, since: float) -> str:
        """The last that the maker's log has of a peer before a time."""
        mine = [m for m in self._timeline.around if m.peer == self._maker and m.at <= since]
        signs = [m for m in mine if peer in m.event.peers]
        if not signs:
            begin = f" since {self._at(mine[0])}" if mine else ""
            return f"it had told nothing of that peer{begin}"
        return f"the last that its log has of it is from {self._at(signs[-1])}: {self._told(signs[-1])}"

    def _told(self, moment: Moment) -> str:
        return self._reason(moment.event.told(self._names))

    def _reason(self, detail: str) -> str:
        """An error without the long ids that it names."""
        for peer in (self._maker, *self.others()):
            detail = detail.replace(peer, self._names(peer))
        return detail or "no reason given"

    def _state(self, peer: str, since: float) -> str:
        """Whether a peer ran at all, and at which round it was."""
        seconds = f"{since - self._timeline.zero:.3f} s"
        spans = self._timeline.alive.get(peer, [])
        covering = [span for span in spans if span[0] <= since <= span[1]]
        if not covering:
            before = [span[1] for span in spans if span[1] < since]
            last = f": its last line is from {before[-1] - self._timeline.zero:.3f} s" if before else ""
            return f" It was not running at {seconds}, or wrote nothing{last}."
        mine = self._of(peer)
        gap = _gap(mine, since)
        silence = (
            f" Its log is silent from {gap[0] - self._timeline.zero:.3f} s to {gap[1] - self._timeline.zero:.3f} s."
        )
        told = silence if gap[1] - gap[0] >= _SILENCE_SECONDS else ""
        heads = [m.event.round for m in mine if isinstance(m.event, HeadMoved) and m.at <= since]
        if heads and heads[-1] != self._timeline.round:
            told += f" It stood before round {heads[-1]} then."
        elif not any(isinstance(m.event, HeadMoved) and m.event.round >= self._timeline.round for m in mine):
            told += f" It had not come to round {self._timeline.round}."
        return told

    def _lost(self) -> str:
        return f" ({self._timeline.lost} events were lost to full disks)" if self._timeline.lost else ""

    def nothing(self) -> Answer:
        """The maker made none; what its log tells instead."""
        thing = f"{self._what} of round {self._timeline.round}"
        if not self._has_log:
            made = f"No log here tells of a {thing} by {self._me}, whose own is not among them."
            return Answer(thing=thing, made=made, fates=())
        clues = [m for m in self._of(self._maker) if isinstance(m.event, _CLUES[self._what])]
        told = "; ".join(f"{self._at(m)} it {_verb(m.event.told(self._names))}" for m in clues[-_CLUES_MAX:])
        timeline = self._timeline
        what_else = (
            f" Its log: {told}." if told else f" Its log says nothing of it.{self._state(self._maker, timeline.zero)}"
        )
        last = max((span[1] for span in timeline.alive.get(self._maker, [])), default=timeline.end)
        if told and last < timeline.end - _SILENCE_SECONDS:
            what_else += f" Its log ends {last - timeline.zero:.3f} s after the head."
        return Answer(thing=thing, made=f"{self._me} made no {thing}.{what_else}", fates=())

    # ---- blobs -------------------------------------------------------------------------------------------------

    def blobs(self, others: Sequence[str]) -> list[Answer]:
        """What became of the blobs that the maker's header names."""
        asked = {
            m.event.blob: m.event
            for m in self._timeline.moments
            if isinstance(m.event, BlobAsked) and m.event.signer == self._maker
        }
        thing = f"blobs of round {self._timeline.round}"
        headers = _Case(self._timeline, "header", self._maker, self._names)
        header = next((headers.record(name, others) for name in headers.ids()), None)
        if header is None:
            return [headers.nothing()]
        sizes = ", ".join(f"{event.section} {blob[:8]} of {event.bytes} bytes" for blob, event in asked.items())
        made = f"{header.made} {f'Others asked for its blobs: {sizes}' if asked else 'Nobody asked for its blobs'}."
        heard = {fate.peer: fate for fate in header.fates}
        fates = tuple(self._transfers(peer, asked, heard[peer]) for peer in others)
        return [Answer(thing=f"its {thing}", made=made, fates=fates)]

    def _transfers(self, peer: str, asked: dict[str, BlobAsked], header: Fate) -> Fate:
        mine = [m for m in self._of(peer) if getattr(m.event, "blob", None) in asked]
        begun = {m.event.blob: m for m in mine if isinstance(m.event, BlobAsked)}
        came = {m.event.blob: m for m in mine if isinstance(m.event, BlobCame)}
        who = self._names(peer)
        if begun and set(begun) <= set(came):
            last = max(came.values(), key=lambda m: m.at)
            assert isinstance(last.event, BlobCame)
            givers = sorted(
                {self._names(h) for m in came.values() if isinstance(m.event, BlobCame) for h in m.event.holders}
            )
            start = min(m.at for m in begun.values())
            told = f"{who} {self._timeline.seconds(last):.3f} s after the head, in {last.at - start:.3f} s"
            source = f" from {', '.join(givers)}" if givers else ""
            return Fate(peer=peer, reached=self._timeline.seconds(last), told=told + source)
        if not begun:
            if peer not in self._timeline.peers:
                return Fate(peer=peer, reached=None, told=f"The log of {who} is not here.")
            if header.reached is None:
                told = f"{who} asked for none of them, for it had not taken the header: {header.told}"
            else:
                told = f"{who} asked for none of them. The header reached {header.told}."
            return Fate(peer=peer, reached=None, told=told)
        parts = [self._missing(blob, mine) for blob in begun if blob not in came]
        return Fate(peer=peer, reached=None, told=f"{who} lacks {'; '.join(parts)}.")

    def _missing(self, blob: str, mine: Sequence[Moment]) -> str:
        events = [m for m in mine if getattr(m.event, "blob", None) == blob]
        asked = next(m for m in events if isinstance(m.event, BlobAsked))
        assert isinstance(asked.event, BlobAsked)
        refusals: dict[str, str] = {}
        for moment in events:
            if isinstance(moment.event, BlobRefused):
                refusals[moment.event.holder] = self._reason(moment.event.reason)
        reasons = [f"{self._names(holder)}: {reason}" for holder, reason in list(refusals.items())[-_REASONS_MAX:]]
        failed = [m for m in events if isinstance(m.event, BlobFailed)]
        end = f"given up {self._at(failed[-1])}" if failed else "no end of that is known"
        why_not = f" ({'; '.join(reasons)})" if reasons else ""
        return f"{asked.event.section} {blob[:8]}, asked for {self._at(asked)}, {end}{why_not}"

    # ---- words -------------------------------------------------------------------------------------------------

    def _of(self, peer: str) -> list[Moment]:
        return [moment for moment in self._timeline.moments if moment.peer == peer]

    def _at(self, moment: Moment) -> str:
        seconds = self._timeline.seconds(moment)
        return f"{abs(seconds):.3f} s {'after' if seconds >= 0 else 'before'} the head"


def _own_reason(event: Event) -> str:
    """Why a push or a hello failed, empty if it did not or only because something before it had."""
    detail = event.detail if isinstance(event, Sent) and event.outcome == "failed" else ""
    detail = event.reason if isinstance(event, Contact) and event.what == "silent" else detail
    return "" if any(hollow in detail for hollow in _HOLLOW) else detail


def _gap(mine: Sequence[Moment], at: float) -> tuple[float, float]:
    """The times of the events around a time."""
    before = max((m.at for m in mine if m.at <= at), default=at)
    return before, min((m.at for m in mine if m.at > at), default=at)


def _verb(told: str) -> str:
    return f"saw its {told}" if told.startswith(("head ", "trainer ")) else told
