"""Several peers' event logs as one timeline of a round, although their clocks differ.

    read_events of each --heads--> the round's window --records sent and received--> offsets of the clocks --> Timeline

Who pushes a record knows when it began and when the answer came; who gets it knows when that was by its own clock. So
each record that went over bounds how far two clocks differ, and the round's records together bound it to milliseconds.
Lines may be lost, and a peer that was killed pushes anew what it had pushed: so a record may say something wrong, and
what most of them say counts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_p2p.peer.events import (
    Event,
    HeaderMade,
    HeadMoved,
    Received,
    Said,
    Sent,
    parse,
)
from spes_p2p.store.events import Life, Line, Log, read_events
from spes_protocols.errors import UserError

MARGIN_SECONDS = 5.0
"""What is read on both sides of a round, to compare clocks by it."""

STRAY_SECONDS = 900.0
"""The same for a peer that never got to the round: nobody knows yet how wrong its clock is."""

RESOLUTION_SECONDS = 0.002
"""Clocks that differ by less are the same: a start's time is written in whole milliseconds."""

SAME_CLOCK_SECONDS = 0.05
"""Starts that find a machine's two clocks no further from where they stood to one another have those very clocks."""

TICK_SECONDS = 1e-6


@dataclass(kw_only=True)
class Moment:
    """One event of one start of a peer, and which clock told its time.

    `at`: Unix seconds by the common clock; for a push, when its last try began.
    `moved`: so many seconds of that were added lest a receipt stand before its push.
    """

    life: int
    clock: int
    peer: str
    event: Event
    at: float
    moved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How a peer's clock was read: seconds added to it, and within how many seconds that is known.

    All starts of a peer share it unless somebody set it, or the machine was started again, in between. `uncertain` is
    infinite where no record went between this peer and those whose clocks it is compared with.
    """

    peer: str
    offset: float
    uncertain: float


@dataclass(kw_only=True)
class Timeline:
    """A round as several peers saw it. `around` is what the logs have from shortly before and after it too."""

    run: str
    round: int
    zero: float
    end: float
    moments: list[Moment]
    clocks: list[Clock]
    agree: bool
    skipped: int = 0
    unknown: int = 0
    lost: int = 0
    alive: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    around: list[Moment] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """The peers whose logs are here."""
        return list(dict.fromkeys(clock.peer for clock in self.clocks))

    def seconds(self, moment: Moment) -> float:
        """Seconds since the round's head was first anybody's."""
        return moment.at - self.zero


def read_round(paths: Sequence[Path], round_number: int | None = None) -> Timeline:
    """The timeline of a round, None: of the last one that is closed in one of the logs.

    Raises `UserError` for files that are no logs, of different runs, or that say nothing of that round.
    """
    heads = [read_events(path, lambda life, line: line.event == HeadMoved.NAME) for path in paths]
    run = _one_run(paths, heads)
    number = _newest(heads) if round_number is None else round_number
    windows = _windows(heads, number)
    if not windows:
        known = sorted({head.round for log in heads for life in log.lives for _, head in _heads(life)})
        reach = f"they reach from round {known[0]} to {known[-1]}" if known else "they tell of no round"
        raise UserError(f"no log here tells of a head before round {number}: {reach}")
    logs = [read_events(path, _Wanted(number, windows)) for path in paths]
    return _merge(run, number, logs)


def _one_run(paths: Sequence[Path], logs: Sequence[Log]) -> str:
    runs: dict[str, Path] = {}
    for path, log in zip(paths, logs, strict=True):
        for life in log.lives:
            runs.setdefault(life.run, path)
    if len(runs) > 1:
        told = "; ".join(f"{path} is of run {run[:16]}" for run, path in runs.items())
        raise UserError(f"these logs are of different runs: {told}")
    if not runs:
        raise UserError(f"{paths[0]} is empty: nothing has happened there yet")
    return next(iter(runs))


# ---- which lines -----------------------------------------------------------------------------------------------------


def _heads(life: Life) -> Iterable[tuple[Line, HeadMoved]]:
    for line in life.lines:
        event = parse(line.event, line.fields)
        if isinstance(event, HeadMoved):
            yield line, event


def _newest(logs: Sequence[Log]) -> int:
    rounds = [head.round for log in logs for life in log.lives for _, head in _heads(life)]
    return max(0, max(rounds, default=0) - 1)


def _key(life: Life) -> tuple[str, int, float]:
    return life.peer, life.started_at, life.started


def _windows(logs: Sequence[Log], number: int) -> dict[tuple[str, int, float], tuple[float, float]]:
    """From when to when each start of a peer stood before this round, by its own steady clock."""
    found: dict[tuple[str, int, float], tuple[float, float]] = {}
    for life in (life for log in logs for life in log.lives):
        begun, ended = math.inf, math.inf
        for line, head in _heads(life):
            if head.round == number:
                begun, ended = min(begun, line.mono), math.inf
            elif begun < math.inf and ended == math.inf:
                ended = line.mono
        if begun < math.inf:
            found[_key(life)] = (begun, ended)
    return found


class _Wanted:
    """Which lines are kept: those of the round's time, and those that name the round."""

    def __init__(self, number: int, windows: Mapping[tuple[str, int, float], tuple[float, float]]) -> None:
        self._number = number
        self._windows = windows
        self._there = {key[0] for key in windows}
        spans = [
            (key[1] / 1000 + begun - key[2], key[1] / 1000 + ended - key[2]) for key, (begun, ended) in windows.items()
        ]
        closed = [ended for _, ended in spans if ended < math.inf]  # whoever died in the round has no end of it
        self._begun, self._ended = min(begun for begun, _ in spans), max(closed, default=math.inf)

    def __call__(self, life: Life, line: Line) -> bool:
        if line.fields.get("round") == self._number:
            return True
        window = self._windows.get(_key(life))
        if window is not None:
            return window[0] - MARGIN_SECONDS <= line.mono <= window[1] + MARGIN_SECONDS
        margin = MARGIN_SECONDS if life.peer in self._there else STRAY_SECONDS
        return self._begun - margin <= life.seconds(line) <= self._ended + margin


# ---- clocks ----------------------------------------------------------------------------------------------------------


@dataclass
class _Push:
    """One record on its way to one peer: the tries and the receipts that the logs tell of."""

    first: Moment | None = None
    taken: Moment | None = None
    refused: Moment | None = None
    heard: Moment | None = None
    turned_down: Moment | None = None


def _pushes(moments: Sequence[Moment], restarted: Collection[int]) -> list[tuple[Moment, _Push]]:
    """(first try, what is known) for every record and receiver whose first try is known; its `at` is when it began.

    What a `restarted` peer did not say anew, it may have pushed before it was killed, and had no time to write that.
    """
    found: dict[tuple[str, str, str], _Push] = {}
    made: set[tuple[int, str]] = set()
    for moment in moments:
        event = moment.event
        if isinstance(event, HeaderMade | Said):
            made.add((moment.life, event.id))
        elif isinstance(event, Sent) and event.outcome != "dropped":
            push = found.setdefault((moment.peer, event.to, event.id), _Push())
            push.first = push.first or moment
            if event.outcome == "delivered":
                push.taken = push.taken or moment
            elif event.outcome == "refused":
                push.refused = push.refused or moment
        elif isinstance(event, Received) and event.check != "busy":  # of those a busy peer does not write down all
            push = found.setdefault((event.sender, moment.peer, event.id), _Push())
            if event.check:
                push.turned_down = push.turned_down or moment
            else:
                push.heard = push.heard or moment
    known = []
    for (_, _, name), push in found.items():
        first = push.first
        if first is None or (first.life in restarted and (first.life, name) not in made):
            continue
        assert isinstance(first.event, Sent)
        if first.event.tries == 1:
            known.append((first, push))
    return known


def _bounds(pushes: Iterable[tuple[Moment, _Push]]) -> dict[tuple[int, int], tuple[float, float]]:
    """(a, b) -> from and to what clock b must be put forward, compared with a, for a < b."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for first, push in pushes:
        for answered, got in ((push.taken, push.heard), (push.refused, push.turned_down)):
            if got is None or first.clock == got.clock:
                continue
            low, high = first.at - got.at, math.inf
            if answered is not None and answered.clock == first.clock:
                assert isinstance(answered.event, Sent)
                high = max(low, answered.at + answered.event.seconds - got.at)
            if first.clock < got.clock:
                found.setdefault((first.clock, got.clock), []).append((low, high))
            else:
                found.setdefault((got.clock, first.clock), []).append((-high, -low))
    return {pair: _shared(spans) for pair, spans in found.items()}


def _shared(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The stretch that most of these have in common, as Marzullo found it; of several such, the one nearest to 0."""
    ends = sorted([(low, 1) for low, _ in spans] + [(high, 2) for _, high in spans])
    found: list[tuple[int, float, float]] = []
    depth = 0
    for (low, end), (high, next_end) in itertools.pairwise(ends):
        depth += 1 if end == 1 else -1
        if (end, next_end) == (1, 2):
            found.append((depth, low, high))
    _, low, high = max(found, key=lambda stretch: (stretch[0], -max(stretch[1], -stretch[2], 0.0)))
    return low, high


def _clock_of(lives: Sequence[Life]) -> list[int]:
    """For each start of a peer the number of the first one that has the same clock."""

    def shares(a: Life, b: Life) -> bool:
        apart = (a.started_at - b.started_at) / 1000 - (a.started - b.started)
        return a.peer == b.peer and abs(apart) <= SAME_CLOCK_SECONDS

    return [next(number for number, first in enumerate(lives) if shares(life, first)) for life in lives]


def _offsets(
    owners: Mapping[int, str], bounds: Mapping[tuple[int, int], tuple[float, float]]
) -> tuple[dict[int, Clock], bool]:
    """What to add to each clock (number -> peer); and whether they agree as they are, so that this is nothing."""
    if all(low <= RESOLUTION_SECONDS and high >= -RESOLUTION_SECONDS for low, high in bounds.values()):
        spread: dict[int, float] = {}
        for pair, (low, high) in bounds.items():
            for number in pair:
                spread[number] = min(spread.get(number, math.inf), max(-low, high, RESOLUTION_SECONDS))
        return {
            number: Clock(peer=peer, offset=0.0, uncertain=spread.get(number, math.inf))
            for number, peer in owners.items()
        }, True
    near: dict[int, list[tuple[int, float, float]]] = {}
    for (a, b), (low, high) in bounds.items():
        ends = [end for end in (low, high) if math.isfinite(end)]  # one way only: as if the fastest record took no time
        middle, spread_ab = sum(ends) / len(ends), abs(high - low) / 2
        near.setdefault(a, []).append((b, middle, spread_ab))
        near.setdefault(b, []).append((a, -middle, spread_ab))
    root = max(near, key=lambda number: (len(near[number]), -number))
    found: dict[int, tuple[float, float]] = {}
    queue = [(0.0, root, 0.0)]
    while queue:
        uncertain, number, offset = heapq.heappop(queue)
        if number in found:
            continue
        found[number] = (offset, uncertain)
        for other, middle, spread_ab in near[number]:
            if other not in found:
                heapq.heappush(queue, (uncertain + spread_ab, other, offset + middle))
    clocks = {}
    for number, peer in owners.items():
        offset, uncertain = found.get(number, (0.0, math.inf))
        clocks[number] = Clock(peer=peer, offset=offset, uncertain=uncertain)
    return clocks, False


def _in_order(pushes: Iterable[tuple[Moment, _Push]], clocks: Mapping[int, Clock]) -> None:
    """Move each receipt that stands before its push to right after it, and nothing else.

    Where the clocks cannot be so far apart, one of the two is not what it seems, and the receipt stays.
    """
    for first, push in pushes:
        for got in (push.heard, push.turned_down):
            if got is None or got.at > first.at:
                continue
            late = first.at + TICK_SECONDS - got.at
            if late <= clocks[first.clock].uncertain + clocks[got.clock].uncertain + RESOLUTION_SECONDS:
                got.at, got.moved = got.at + late, late


# ---- the round -------------------------------------------------------------------------------------------------------


def _merge(run: str, number: int, logs: Sequence[Log]) -> Timeline:
    lives = list({_key(life): life for log in logs for life in log.lives}.values())
    clock_of = _clock_of(lives)
    every, unknown = [], 0
    for index, life in enumerate(lives):
        clock = clock_of[index]
        mine = []
        for line in life.lines:
            event = parse(line.event, line.fields)
            if event is None:
                unknown += 1
                continue
            at = lives[clock].seconds(line) - (event.seconds if isinstance(event, Sent) else 0.0)
            mine.append(Moment(life=index, clock=clock, peer=life.peer, event=event, at=at))
        every.append(sorted(mine, key=lambda moment: moment.at))
    pushes = _pushes([moment for mine in every for moment in mine], _restarted(lives))
    owners = {clock: life.peer for clock, life in zip(clock_of, lives, strict=True) if life.lines}
    clocks, agree = _offsets(owners, _bounds(pushes))
    alive: dict[str, list[tuple[float, float]]] = {}
    for mine in filter(None, every):
        for moment in mine:
            moment.at += clocks[moment.clock].offset
        alive.setdefault(mine[0].peer, []).append((mine[0].at, mine[-1].at))
    _in_order(pushes, clocks)
    zero, end, moments = _of_round(number, every)
    around = sorted((moment for mine in every for moment in mine), key=lambda moment: moment.at)
    return Timeline(
        run=run, round=number, zero=zero, end=end, moments=moments, clocks=list(clocks.values()), agree=agree,
        alive=alive, around=around, unknown=unknown,
        skipped=sum(log.skipped for log in logs), lost=sum(log.lost for log in logs),
    )  # fmt: skip


def _restarted(lives: Sequence[Life]) -> set[int]:
    """The numbers of those that are not the first start of their peer, as far as the logs reach."""
    return {number for number, life in enumerate(lives) if life.peer in {earlier.peer for earlier in lives[:number]}}


def _of_round(number: int, every: Sequence[Sequence[Moment]]) -> tuple[float, float, list[Moment]]:
    """(when the round's head was first anybody's, when the last peer went on, what happened in the round)."""
    first: dict[str, float] = {}
    for moment in (moment for mine in every for moment in mine):
        if isinstance(moment.event, HeadMoved) and moment.event.round == number:
            epoch = moment.event.epoch
            first[epoch] = min(first.get(epoch, math.inf), moment.at)
    epoch = max(first, key=lambda each: first[each])  # of a round that a reset began again, the last time
    zero = first[epoch]
    spans = [_span(number, epoch, mine) for mine in every]
    end = max((span[1] for span in spans if span is not None), default=math.inf)
    rounds = _rounds_of_ids(every)
    found = []
    for mine, span in zip(every, spans, strict=True):
        begun, ended = span or (zero, end)
        found += [m for m in mine if m.at >= zero and _belongs(m, number, rounds, begun, ended)]
    return zero, end, sorted(found, key=lambda moment: moment.at)


def _span(number: int, epoch: str, mine: Sequence[Moment]) -> tuple[float, float] | None:
    begun, ended = math.inf, math.inf
    for moment in mine:
        if not isinstance(moment.event, HeadMoved):
            continue
        if (moment.event.round, moment.event.epoch) == (number, epoch):
            begun = min(begun, moment.at)
        elif begun < math.inf and ended == math.inf:
            ended = moment.at
    if begun == math.inf:
        return None
    return begun, ended if ended < math.inf else mine[-1].at


def _rounds_of_ids(every: Sequence[Sequence[Moment]]) -> dict[str, int]:
    """Which round a record is of, by whoever knows; only of those that are of one."""
    found: dict[str, int] = {}
    for event in (moment.event for mine in every for moment in mine):
        if isinstance(event, HeaderMade | Said | Received) and event.round >= 0:
            found[event.id] = event.round
    return found


def _belongs(moment: Moment, number: int, rounds: Mapping[str, int], begun: float, ended: float) -> bool:
    event: Any = moment.event
    inside = begun <= moment.at <= ended
    if isinstance(event, HeadMoved):
        return inside or event.round == number
    told = rounds.get(event.id) if isinstance(event, Sent | Received) else getattr(event, "round", None)
    if isinstance(event, Received) and event.round >= 0:
        told = event.round
    return inside if told is None or told < 0 else told == number
