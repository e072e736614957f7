"""Several peers' event logs as one timeline of a round, although their clocks differ.

    read_events of each --heads--> the round's window --records sent and received--> offsets of the clocks --> Timeline

Who pushes a record knows when it began and when the answer came; who gets it knows when that was by its own clock. So
each record that went over bounds how far two clocks differ, and the round's records together bound it to milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
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

TICK_SECONDS = 1e-6
PASSES_MAX = 64


@dataclass(kw_only=True)
class Moment:
    """One event of one start of a peer. `at`: Unix seconds by the common clock; for a push, when its last try began."""

    life: int
    peer: str
    event: Event
    at: float


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How a peer's clock was read: seconds added to it, and within how many seconds that is known.

    `uncertain` is infinite where no record went between this peer and those whose clocks it is compared with.
    """

    peer: str
    offset: float
    uncertain: float


@dataclass(kw_only=True)
class Timeline:
    """A round as several peers saw it."""

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
        spans = [
            (key[1] / 1000 + begun - key[2], key[1] / 1000 + ended - key[2]) for key, (begun, ended) in windows.items()
        ]
        self._begun, self._ended = min(begun for begun, _ in spans), max(ended for _, ended in spans)

    def __call__(self, life: Life, line: Line) -> bool:
        if line.fields.get("round") == self._number:
            return True
        window = self._windows.get(_key(life))
        if window is not None:
            return window[0] - MARGIN_SECONDS <= line.mono <= window[1] + MARGIN_SECONDS
        return self._begun - STRAY_SECONDS <= life.seconds(line) <= self._ended + STRAY_SECONDS


# ---- clocks ----------------------------------------------------------------------------------------------------------


@dataclass
class _Push:
    """One record on its way to one peer: the tries and the receipts that the logs tell of."""

    first: Moment | None = None
    taken: Moment | None = None
    refused: Moment | None = None
    heard: Moment | None = None
    turned_down: Moment | None = None


def _pushes(moments: Iterable[Moment]) -> list[_Push]:
    """Every record and receiver; a push's `at` is when it began."""
    found: dict[tuple[str, str, str], _Push] = {}
    for moment in moments:
        event = moment.event
        if isinstance(event, Sent) and event.outcome != "dropped":
            push = found.setdefault((moment.peer, event.to, event.id), _Push())
            push.first = push.first or moment
            if event.outcome == "delivered":
                push.taken = push.taken or moment
            elif event.outcome == "refused":
                push.refused = push.refused or moment
        elif isinstance(event, Received):
            push = found.setdefault((event.sender, moment.peer, event.id), _Push())
            if event.check:
                push.turned_down = push.turned_down or moment
            else:
                push.heard = push.heard or moment
    return list(found.values())


def _bounds(pushes: Iterable[_Push]) -> dict[tuple[int, int], tuple[float, float]]:
    """(a, b) -> from and to what b's clock must be put forward, compared with a's, for a < b."""
    found: dict[tuple[int, int], tuple[float, float]] = {}

    def narrow(sender: int, receiver: int, low: float, high: float) -> None:
        key, pair = ((sender, receiver), (low, high)) if sender < receiver else ((receiver, sender), (-high, -low))
        known = found.get(key, (-math.inf, math.inf))
        found[key] = (max(known[0], pair[0]), min(known[1], pair[1]))

    for push in pushes:
        for answered, got in ((push.taken, push.heard), (push.refused, push.turned_down)):
            if push.first is None or got is None or push.first.life == got.life:
                continue
            narrow(push.first.life, got.life, push.first.at - got.at, math.inf)
            if answered is not None and answered.life == push.first.life:
                assert isinstance(answered.event, Sent)
                narrow(push.first.life, got.life, -math.inf, answered.at + answered.event.seconds - got.at)
    return found


def _offsets(lives: Sequence[Life], bounds: Mapping[tuple[int, int], tuple[float, float]]) -> tuple[list[Clock], bool]:
    """What to add to each start's clock; and whether the clocks agree as they are, so that this is nothing."""
    if all(low <= RESOLUTION_SECONDS and high >= -RESOLUTION_SECONDS for low, high in bounds.values()):
        spread: dict[int, float] = {}
        for pair, (low, high) in bounds.items():
            for number in pair:
                spread[number] = min(spread.get(number, math.inf), max(-low, high, RESOLUTION_SECONDS))
        pairs = enumerate(lives)
        return [Clock(peer=life.peer, offset=0.0, uncertain=spread.get(n, math.inf)) for n, life in pairs], True
    near: dict[int, list[tuple[int, float, float]]] = {}
    for (a, b), (low, high) in bounds.items():
        ends = [end for end in (low, high) if math.isfinite(end)]  # one way only: as if the fastest record took no time
        middle, spread_ab = sum(ends) / len(ends), abs(high - low) / 2
        near.setdefault(a, []).append((b, middle, spread_ab))
        near.setdefault(b, []).append((a, -middle, spread_ab))
    root = max(near, key=lambda life: (len(near[life]), -life))
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
    clocks = []
    for number, life in enumerate(lives):
        offset, uncertain = found.get(number, (0.0, math.inf))
        clocks.append(Clock(peer=life.peer, offset=offset, uncertain=uncertain))
    return clocks, False


def _in_order(moments: list[list[Moment]], pushes: Iterable[_Push]) -> None:
    """Move moments later, as little as it takes, so that no receipt stands before its push; each peer's order stays.

    Where clocks are known well enough nothing moves.
    """
    causes = {id(got): push.first for push in pushes for got in (push.heard, push.turned_down) if got and push.first}
    for _ in range(PASSES_MAX):
        moved = False
        for line in moments:
            before = -math.inf
            for moment in line:
                cause = causes.get(id(moment))
                floor = max(before, cause.at if cause is not None else -math.inf)
                if moment.at <= floor:
                    moment.at, moved = floor + TICK_SECONDS, True
                before = moment.at
        if not moved:
            return


# ---- the round -------------------------------------------------------------------------------------------------------


def _merge(run: str, number: int, logs: Sequence[Log]) -> Timeline:
    lives = list({_key(life): life for log in logs for life in log.lives}.values())
    every, unknown = [], 0
    for index, life in enumerate(lives):
        mine = []
        for line in life.lines:
            event = parse(line.event, line.fields)
            if event is None:
                unknown += 1
                continue
            begun = event.seconds if isinstance(event, Sent) else 0.0
            mine.append(Moment(life=index, peer=life.peer, event=event, at=life.seconds(line) - begun))
        every.append(sorted(mine, key=lambda moment: moment.at))
    pushes = _pushes(moment for mine in every for moment in mine)
    clocks, agree = _offsets(lives, _bounds(pushes))
    for mine, clock in zip(every, clocks, strict=True):
        for moment in mine:
            moment.at += clock.offset
    _in_order(every, pushes)
    zero, end, moments = _of_round(number, every)
    alive: dict[str, list[tuple[float, float]]] = {}
    for mine in every:
        if mine:
            alive.setdefault(mine[0].peer, []).append((mine[0].at, mine[-1].at))
    kept = [clock for clock, life in zip(clocks, lives, strict=True) if life.lines]
    return Timeline(
        run=run, round=number, zero=zero, end=end, moments=moments, clocks=kept, agree=agree, alive=alive,
        skipped=sum(log.skipped for log in logs), unknown=unknown, lost=sum(log.lost for log in logs),
    )  # fmt: skip


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
