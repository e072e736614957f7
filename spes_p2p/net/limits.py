"""Limits for a volunteer's line: rates as people write them, and what bytes between peers wait for.

    --max-up 10mbit,23:00-07:00=none --> Schedule --> Limiter <--take-- libp2p.py, before each piece it writes or reads

Small messages pass at once and are counted. Larger requests and answers go before streams, and in each of the two kinds
the peers take turns, a piece at a time. While a task waits here the time of its `fair_timeout`s stands still: nobody is
given up for what only our own limit slows.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import math
import re
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spes_p2p.net.addresses import is_circuit
from spes_protocols.errors import NetworkError, UserError

PIECE_BYTES = 64 * 1024
"""Nobody takes more at a time, so that everybody's turn comes soon."""

SMALL_BYTES = 16 * 1024
"""A call or stream that moves less one way waits for nobody: votes, headers, greetings."""

BURST_BYTES_MIN = 256 * 1024
BURST_SECONDS = 0.25
"""After a silence so much passes at once: what the rate gives in this time, or at least those bytes."""

UP_MIN = 150_000.0
"""Bytes per second below which others would give up on us. They wait 20 s for an answer of the ledger, which has up to
2 MiB and may have to share with streams, and 75 s for each of the two leaves of 4 MiB that a newcomer asks for at once.
"""

DOWN_MIN = 62_500.0
"""Bytes per second below which others would give up on us. They try for 10 s to push a proposal, which has some 400 kB
in the largest runs, and for 60 s to send the next piece of each stream that we have asked for."""

RATE_MAX = 12.5e9
WINDOWS_MAX = 48
_TEXT_CHARACTERS_MAX = 1200

_STREAM_SECONDS = 3.0
"""So many streams are served under a limit that a piece of each takes this long. Readers wait 15 s or 20 s for a piece,
and streams have a quarter of the line while larger answers go first."""

_CALLS_PER_STREAM = 3
"""Pieces of calls that go before one of a stream, while there are both."""

_LOOK_SECONDS = 1.0
_NAP_SECONDS = 0.001
_DAY = 24 * 60
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([a-zA-Z]{1,5})")
_WINDOW = re.compile(r"(\d\d?:\d\d)-(\d\d?:\d\d)=(.*)")
_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)|24:00")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9}
_LOCAL = [
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7",
        "169.254.0.0/16", "fe80::/10", "127.0.0.0/8", "::1/128",
    )
]  # fmt: skip


# ---- rates and schedules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Window:
    """A rate from minute `begin` of the day to before `end`, over midnight where that is earlier. None: no limit."""

    begin: int
    end: int
    rate: float | None

    def holds(self, minute: int) -> bool:
        """Whether this minute of the day lies in it."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Bytes per second over a day of local time: `rate`, and windows of which the last that holds counts."""

    rate: float | None = None
    windows: tuple[Window, ...] = ()

    @property
    def is_unlimited(self) -> bool:
        """Whether there is no limit at any time."""
        return self.rate is None and all(window.rate is None for window in self.windows)

    def rate_at(self, minute: int) -> float | None:
        """Bytes per second in this minute of the day, None without a limit."""
        for window in reversed(self.windows):
            if window.holds(minute):
                return window.rate
        return self.rate

    def words(self, minute: int) -> str:
        """The limit in this minute and until when: `50 Mbit/s until 07:00`, `none`."""
        now = self.rate_at(minute)
        edges = {edge for window in self.windows for edge in (window.begin, window.end)}
        changes = [edge for edge in edges if self.rate_at(edge) != now]
        until = min(changes, key=lambda edge: (edge - minute) % _DAY, default=None)
        return rate_text(now) + ("" if until is None else f" until {until // 60:02d}:{until % 60:02d}")


UNLIMITED = Schedule()


def minute_now() -> int:
    """The minute of the day by this machine's local time."""
    now = time.localtime()
    return 60 * now.tm_hour + now.tm_min


def rate_text(rate: float | None) -> str:
    """A rate for people: `10 Mbit/s`; `none` without a limit."""
    return "none" if rate is None else f"{8 * rate / 1e6:.6g} Mbit/s"


def parse_rate(text: str) -> float | None:
    """Bytes per second of `10mbit`, `500kbit`, `1.5gbit` (bits) or `2MB` (bytes), None for `none`.

    Raises `UserError`.
    """
    if text == "none":
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a rate; it looks like 10mbit, 500kbit, 2MB or none")
    number, unit = float(match[1]), match[2]
    if unit.lower() in _BITS:
        rate = number * _BITS[unit.lower()] / 8
    elif unit in _BYTES:
        rate = number * _BYTES[unit]
    elif unit.upper() in _BYTES:
        bits, whole = f"{match[1]}{unit[0].lower()}bit", f"{match[1]}{unit.upper()}"
        raise UserError(f"{text!r}: write {bits} for bits or {whole} for bytes a second")
    else:
        raise UserError(f"{text!r}: {unit!r} is not a unit; use kbit, mbit, gbit (bits) or kB, MB, GB (bytes) a second")
    if not rate:
        raise UserError(f"{text!r}: nothing would pass; for no limit write none")
    if rate > RATE_MAX:
        raise UserError(f"{text!r} is more than {_typed(RATE_MAX)}; for no limit write none")
    return rate


def parse_schedule(text: str) -> Schedule:
    """`RATE` or `RATE,23:00-07:00=RATE,...`. Raises `UserError` that says which part is wrong."""
    if len(text) > _TEXT_CHARACTERS_MAX:
        raise UserError(f"{len(text)} characters are too long for a schedule")
    first, *rest = (part.strip() for part in text.split(","))
    if "=" in first:
        raise UserError(f"{first!r}: the first part is the rate outside of all windows, such as 10mbit or none")
    if len(rest) > WINDOWS_MAX:
        raise UserError(f"{len(rest)} windows, at most {WINDOWS_MAX}")
    return Schedule(rate=parse_rate(first), windows=tuple(_window(part) for part in rest))


def max_up(text: str) -> Schedule:
    """The value of `--max-up`. Raises `UserError`, also where others would give up on so slow a peer."""
    return _flag("--max-up", text, UP_MIN)


def max_down(text: str) -> Schedule:
    """The value of `--max-down`. Raises `UserError`, also where others would give up on so slow a peer."""
    return _flag("--max-down", text, DOWN_MIN)


def relay_rate(text: str) -> float | None:
    """The value of `--relay-rate`: bytes per second, None without a limit. Raises `UserError` as `max_up` does."""
    schedule = _flag("--relay-rate", text, UP_MIN)
    if schedule.windows:
        raise UserError("--relay-rate: it holds all day; give one rate, such as 10mbit, or none")
    return schedule.rate


def _flag(name: str, text: str, least: float) -> Schedule:
    try:
        schedule = parse_schedule(text)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    slowest = min((r for r in (schedule.rate, *(w.rate for w in schedule.windows)) if r is not None), default=least)
    if slowest < least:
        raise UserError(
            f"{name}: {_typed(slowest)} is too little: the deadlines of other peers would pass; "
            f"give at least {_typed(least)}, or none"
        )
    return schedule


def _typed(rate: float) -> str:
    return f"{8 * rate / 1e6:g}mbit" if 8 * rate >= 1e6 else f"{8 * rate / 1e3:g}kbit"


def _window(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a window; it looks like 23:00-07:00=50mbit")
    begin, end = _minute(match[1], text), _minute(match[2], text)
    if begin == end:
        raise UserError(f"{text!r} begins when it ends; a rate for the whole day stands first, without a time")
    return Window(begin=begin, end=end, rate=parse_rate(match[3]))


def _minute(text: str, window: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise UserError(f"{window!r}: {text!r} is not a time of day from 00:00 to 24:00")
    return 60 * int(match[1]) + int(match[2]) if match[1] else 0


def is_local(addresses: Collection[str]) -> bool:
    """Whether a peer connected at these multiaddrs is one of the LAN, or of this machine.

    It is if there is a direct connection to it, and each has a private, link-local or loopback address.
    """
    direct = [address for address in addresses if not is_circuit(address)]
    return bool(direct) and all(_is_local_address(address) for address in direct)


def _is_local_address(multiaddr: str) -> bool:
    parts = multiaddr.split("/")
    if parts[1:2] == ["ip6zone"]:
        parts = parts[2:]
    try:
        address = ipaddress.ip_address(parts[2])
    except (IndexError, ValueError):
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in _LOCAL)


# ---- deadlines -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Patience:
    """One task: its timeouts that are open, and the seconds it has waited for our own limits."""

    timeouts: list[asyncio.Timeout] = field(default_factory=list)
    held_seconds: float = 0.0
    held_since: float | None = None


_patience: weakref.WeakKeyDictionary[asyncio.Task[Any], _Patience] = weakref.WeakKeyDictionary()


def _patience_of(task: asyncio.Task[Any] | None) -> _Patience:
    task = task or asyncio.current_task()
    assert task is not None
    return _patience.setdefault(task, _Patience())


def fair_time(task: asyncio.Task[Any] | None = None) -> float:
    """The event loop's time without what this task has waited for our own limits: what others can be blamed for."""
    patience, now = _patience_of(task), asyncio.get_running_loop().time()
    return (now if patience.held_since is None else patience.held_since) - patience.held_seconds


@contextlib.asynccontextmanager
async def fair_timeout(seconds: float | None) -> AsyncIterator[None]:
    """As `asyncio.timeout`, by `fair_time`."""
    patience = _patience_of(None)
    async with asyncio.timeout(seconds) as timeout:
        patience.timeouts.append(timeout)
        try:
            yield
        finally:
            patience.timeouts.remove(timeout)


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """This task waits for our own limits: its timeouts stand still."""
    patience, clock = _patience_of(None), asyncio.get_running_loop().time
    begun = clock()
    left = [
        (timeout, when - begun)
        for timeout in patience.timeouts
        if (when := timeout.when()) is not None and not timeout.expired()
    ]
    for timeout, _ in left:
        timeout.reschedule(None)
    patience.held_since = begun
    try:
        yield
    finally:
        ended = clock()
        patience.held_since = None
        patience.held_seconds += ended - begun
        for timeout, seconds in left:
            timeout.reschedule(ended + seconds)


# ---- the limiter -----------------------------------------------------------------------------------------------------


class Lane(enum.Enum):
    """How urgent bytes are."""

    SMALL = enum.auto()
    CALL = enum.auto()
    STREAM = enum.auto()


@dataclass(kw_only=True, eq=False)
class _Ask:
    """Bytes that wait for their turn."""

    count: int
    turn: asyncio.Future[None]


class _Turns:
    """Peers in turn, and what one of them asks for in order."""

    def __init__(self) -> None:
        self._by_peer: dict[str, deque[_Ask]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_peer)

    def add(self, peer: str, ask: _Ask) -> None:
        self._by_peer.setdefault(peer, deque()).append(ask)

    def discard(self, peer: str, ask: _Ask) -> None:
        asks = self._by_peer.get(peer, deque())
        if ask in asks:
            asks.remove(ask)
            if not asks:
                del self._by_peer[peer]

    def pop(self) -> _Ask:
        peer = next(iter(self._by_peer))
        asks = self._by_peer.pop(peer)
        ask = asks.popleft()
        if asks:
            self._by_peer[peer] = asks  # behind the others
        return ask


class Limiter:
    """A token bucket for one direction. In t seconds at most `rate * t` and one burst pass.

    `clock` gives seconds that `sleep` lets pass, `minute` the minute of the day.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        minute: Callable[[], int] = minute_now,
    ) -> None:
        self._schedule = schedule
        self._clock = clock
        self._sleep = sleep
        self._minute = minute
        self._at = clock()
        self._balance = math.inf
        """Bytes that may pass now; less than nothing after those that did not wait."""
        self._small = math.inf
        """Bytes of small messages that need not wait. It fills at half the rate: a flood of them cannot take it all."""
        self._calls, self._streams = _Turns(), _Turns()
        self._calls_in_row = 0
        self._serving: asyncio.Task[None] | None = None
        self._places: Counter[str] = Counter()

    async def take(self, peer: str, count: int, lane: Lane) -> None:
        """Count up to `PIECE_BYTES` that are about to be moved to or from a peer, once it is their turn."""
        assert 0 < count <= PIECE_BYTES
        rate = self._settle()
        if lane is Lane.SMALL and self._small >= count:
            self._small -= count
            self._balance -= count
            return
        if rate is None or (self._balance >= 0 and not self._calls and not self._streams):
            self._balance -= count
            return
        ask = _Ask(count=count, turn=asyncio.get_running_loop().create_future())
        turns = self._streams if lane is Lane.STREAM else self._calls
        turns.add(peer, ask)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        try:
            with _held():
                await ask.turn
        finally:
            turns.discard(peer, ask)

    @contextlib.contextmanager
    def place(self, peer: str, *, is_favoured: bool) -> Iterator[None]:
        """A place for a stream that is served, while it lasts.

        Raises `NetworkError` where one more would make all of them too slow for their readers. One peer has half of the
        places at most, and those that are not favoured have half together.
        """
        rate = self._settle()
        if rate is not None:
            places = int(rate * _STREAM_SECONDS / PIECE_BYTES)
            taken = self._places.total()
            if taken >= (places if is_favoured else places // 2) or self._places[peer] >= places // 2:
                raise NetworkError("busy with others within the limit of its line, try again later")
        self._places[peer] += 1
        try:
            yield
        finally:
            self._places[peer] -= 1
            if not self._places[peer]:
                del self._places[peer]

    def _settle(self) -> float | None:
        """Add what the time since the last look gives; returns the rate in force."""
        now, rate = self._clock(), self._schedule.rate_at(self._minute())
        passed, self._at = now - self._at, now
        if rate is None:
            self._balance = self._small = math.inf
        else:
            burst = max(BURST_BYTES_MIN, rate * BURST_SECONDS)
            # A piece may begin when nothing is owed, so that the burst has room for one more.
            self._balance = min(self._balance + passed * rate, burst - PIECE_BYTES)
            self._small = min(self._small + passed * rate / 2, burst)
        return rate

    async def _serve(self) -> None:
        """Give turns until nobody waits."""
        while self._calls or self._streams:
            rate = self._settle()
            if rate is not None and self._balance < 0:
                await self._sleep(min(max(-self._balance / rate, _NAP_SECONDS), _LOOK_SECONDS))
                continue
            ask = self._next()
            if not ask.turn.done():  # else whoever asked has been cancelled
                self._balance -= ask.count
                ask.turn.set_result(None)

    def _next(self) -> _Ask:
        if self._calls and (not self._streams or self._calls_in_row < _CALLS_PER_STREAM):
            self._calls_in_row += 1
            return self._calls.pop()
        self._calls_in_row = 0
        return self._streams.pop()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a transport keeps to. Peers of the LAN do not count, unless `counts_local`."""

    up: Limiter | None = None
    down: Limiter | None = None
    counts_local: bool = False

    @classmethod
    def of(cls, up: Schedule, down: Schedule) -> Limits:
        """Limiters where there is anything to limit."""
        up_limiter, down_limiter = (None if each.is_unlimited else Limiter(each) for each in (up, down))
        return cls(up=up_limiter, down=down_limiter)


class Flow:
    """What one call or stream moves one way. `limiter` None: as fast as it goes."""

    def __init__(self, limiter: Limiter | None = None, peer: str = "", *, is_stream: bool = False) -> None:
        self.limiters = [] if limiter is None else [limiter]
        self._peer = peer
        self._is_stream = is_stream
        self._moved = 0

    def add(self, limiters: Sequence[Limiter]) -> None:
        """Wait for these too from now on."""
        self.limiters += limiters

    def lane(self, length: int) -> Lane:
        """The lane of the next frame, of so many bytes. Many small ones on one stream are not small."""
        self._moved += length
        if self._moved < SMALL_BYTES:
            return Lane.SMALL
        return Lane.STREAM if self._is_stream else Lane.CALL

    async def take(self, count: int, lane: Lane) -> None:
        """Wait until the next `count` bytes of the frame may be moved."""
        for limiter in self.limiters:
            await limiter.take(self._peer, count, lane)


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of so many bytes."""
    for begin in range(0, length, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, length)
