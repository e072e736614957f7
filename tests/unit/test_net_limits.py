"""Rates and schedules as people write them, and the limiter on a clock of its own: nothing here waits for real time."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_client.join import build_parser as join_parser
from spes_client.join import options_of
from spes_p2p.net.limits import (
    BURST_BYTES_MIN,
    DOWN_MIN,
    PIECE_BYTES,
    SMALL_BYTES,
    UNLIMITED,
    UP_MIN,
    WINDOWS_MAX,
    Flow,
    Lane,
    Limiter,
    Limits,
    Schedule,
    is_local,
    max_down,
    max_up,
    minute_now,
    parse_rate,
    parse_schedule,
    pieces,
    rate_text,
)
from spes_p2p.peer.status import _add_limits
from spes_protocols.control_pb2 import StatusReply
from spes_protocols.errors import NetworkError, UserError

RATE = 1_000_000.0


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        for _ in range(20):  # so that whoever was served has asked again
            await asyncio.sleep(0)


class Gate(Clock):
    """One whose sleepers wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await self.opened.wait()
        await super().sleep(seconds)


def limiter(clock: Clock, schedule: Schedule | None = None, minute: Callable[[], int] = lambda: 0) -> Limiter:
    return Limiter(schedule or Schedule(rate=RATE), clock=clock, sleep=clock.sleep, minute=minute)


async def until(holds: Callable[[], bool]) -> None:
    """Let the others go on until it holds; fails when that takes too many turns."""
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never holds")


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


# ---- rates and schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10mbit", 1_250_000),
        ("10Mbit", 1_250_000),
        ("500kbit", 62_500),
        ("1.5gbit", 187_500_000),
        ("2MB", 2_000_000),
        ("2 MB", 2_000_000),
        ("300kB", 300_000),
        ("none", None),
    ],
)
def test_rates(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a rate; it looks like 10mbit"),
        ("10", "'10' is not a rate"),
        ("-1mbit", "is not a rate"),
        ("1e9mbit", "is not a rate"),
        ("nanmbit", "is not a rate"),
        ("10mbit/s", "is not a rate"),
        ("10mbps", "'mbps' is not a unit; use kbit, mbit, gbit"),
        ("2mb", "write 2mbit for bits or 2MB for bytes"),
        ("2Mb", "write 2mbit for bits or 2MB for bytes"),
        ("0mbit", "nothing would pass"),
        ("101gbit", "is more than 100000mbit"),
        ("10mbit,", "'' is not a window; it looks like 23:00-07:00=50mbit"),
        ("23:00-07:00=50mbit", "the first part is the rate outside of all windows"),
        ("10mbit,23:00-07:00", "is not a window"),
        ("10mbit,23:00-25:00=50mbit", "'25:00' is not a time of day"),
        ("10mbit,23:60-01:00=50mbit", "'23:60' is not a time of day"),
        ("10mbit,7:00-07:00=50mbit", "begins when it ends"),
        ("10mbit,00:00-24:00=50mbit", "begins when it ends"),
        ("10mbit,23:00-07:00=fast", "'fast' is not a rate"),
        ("1mbit" + ",01:00-02:00=none" * (WINDOWS_MAX + 1), f"{WINDOWS_MAX + 1} windows, at most {WINDOWS_MAX}"),
        ("1mbit" * 1000, "too long for a schedule"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse_schedule(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(alphabet="0123456789:-=,.mbitMBkgnoe ", max_size=60))
def test_any_text_is_a_schedule_or_an_error_for_people(text: str) -> None:
    try:
        schedule = parse_schedule(text)
    except UserError:
        return
    for minute in range(0, 1440, 7):
        rate = schedule.rate_at(minute)
        assert rate is None or rate > 0


def test_a_schedule_over_midnight_of_which_the_last_window_counts() -> None:
    schedule = parse_schedule("10mbit,23:00-07:00=50mbit,12:00-13:00=none, 6:30-8:00=20mbit,22:00-24:00=30mbit")
    for time, mbit in (
        ("00:00", 50), ("06:29", 50), ("06:30", 20), ("07:59", 20), ("08:00", 10), ("11:59", 10), ("12:00", None),
        ("12:59", None), ("13:00", 10), ("21:59", 10), ("22:00", 30), ("23:59", 30),
    ):  # fmt: skip
        hours, minutes = map(int, time.split(":"))
        rate = schedule.rate_at(60 * hours + minutes)
        assert rate == (None if mbit is None else mbit * 125_000), time
    assert schedule.words(0) == "50 Mbit/s until 06:30"
    assert schedule.words(23 * 60) == "30 Mbit/s until 00:00"
    assert schedule.words(12 * 60 + 30) == "none until 13:00"
    assert schedule.words(9 * 60) == "10 Mbit/s until 12:00"
    assert parse_schedule("1.5gbit").words(0) == "1500 Mbit/s"
    assert UNLIMITED.words(0) == rate_text(None) == "none"
    same = parse_schedule("10mbit,01:00-02:00=10mbit")
    assert same.words(0) == "10 Mbit/s"


def test_a_limit_that_others_would_give_up_on_is_refused_with_the_least_that_works() -> None:
    for flag, parse, least in (("--max-up", max_up, "1.2mbit"), ("--max-down", max_down, "500kbit")):
        assert parse(least).rate == (UP_MIN if parse is max_up else DOWN_MIN)
        assert parse("none") == UNLIMITED
        for text in ("100kbit", "10mbit,01:00-02:00=100kbit", "none,01:00-02:00=100kbit"):
            with pytest.raises(UserError) as error:
                parse(text)
            assert str(error.value) == (
                f"{flag}: 100kbit is too little: the deadlines of other peers would pass; "
                f"give at least {least}, or none"
            )
        with pytest.raises(UserError, match=f"^{flag}: 'mice' is not a rate"):
            parse("mice")


def test_the_flags_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPES_MAX_DOWN", "20mbit")
    options = options_of(join_parser().parse_args(["--max-up", "10mbit,23:00-07:00=none"]))
    assert options.max_up == parse_schedule("10mbit,23:00-07:00=none")
    assert options.max_down == parse_schedule("20mbit")
    monkeypatch.setenv("SPES_MAX_DOWN", "20 snails")
    with pytest.raises(UserError, match="--max-down: '20 snails'"):
        join_parser().parse_args([])
    monkeypatch.delenv("SPES_MAX_DOWN")
    assert options_of(join_parser().parse_args([])).max_up == UNLIMITED


def test_status_shows_what_is_in_force() -> None:
    def shown(up: str, down: str) -> tuple[str, float, float]:
        reply = StatusReply()
        options = SimpleNamespace(max_up=parse_schedule(up), max_down=parse_schedule(down))
        _add_limits(cast(Any, SimpleNamespace(options=options)), reply)
        return reply.limits, reply.limit_up_bytes_per_second, reply.limit_down_bytes_per_second

    assert shown("none", "none") == ("", 0.0, 0.0)
    assert shown("10mbit", "none") == ("up 10 Mbit/s, down none", 1_250_000, 0.0)
    hour = minute_now() // 60  # far from the window's ends, however slowly this runs
    begin, end = (hour + 12) % 24, (hour + 13) % 24
    limits, up, down = shown("none", f"10mbit,{begin:02d}:00-{end:02d}:00=20mbit")
    assert limits == f"up none, down 10 Mbit/s until {begin:02d}:00"
    assert (up, down) == (0.0, 1_250_000)


@pytest.mark.parametrize(
    ("addresses", "local"),
    [
        (["/ip4/192.168.1.7/tcp/4001"], True),
        (["/ip4/10.1.2.3/tcp/4001"], True),
        (["/ip4/172.31.0.1/tcp/4001"], True),
        (["/ip4/169.254.7.7/tcp/4001"], True),
        (["/ip4/127.0.0.1/tcp/4001"], True),
        (["/ip6/::1/tcp/4001"], True),
        (["/ip6/fd00::7/tcp/4001"], True),
        (["/ip6zone/eth0/ip6/fe80::1/tcp/4001"], True),
        (["/ip6/::ffff:192.168.1.7/tcp/4001"], True),
        (["/ip4/172.32.0.1/tcp/4001"], False),
        (["/ip4/100.64.0.1/tcp/4001"], False),
        (["/ip4/203.0.113.7/tcp/4001"], False),
        (["/ip6/2001:db8::1/tcp/4001"], False),
        (["/dns4/localhost/tcp/4001"], False),
        (["/ip4/192.168.1.7/tcp/4001/p2p/12D3KooW/p2p-circuit"], False),
        (["/ip4/192.168.1.7/tcp/4001", "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW/p2p-circuit"], True),
        (["/ip4/192.168.1.7/tcp/4001", "/ip4/203.0.113.7/tcp/4001"], False),
        ([], False),
        (["", "/"], False),
    ],
)
def test_who_is_of_the_lan(addresses: list[str], local: bool) -> None:
    assert is_local(addresses) is local


# ---- the limiter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [UP_MIN, RATE, 100 * RATE])
def test_a_burst_passes_at_once_and_the_rest_at_the_rate(rate: float) -> None:
    async def work() -> None:
        clock = Clock()
        limit, burst = limiter(clock, Schedule(rate=rate)), max(BURST_BYTES_MIN, rate / 4)
        moved = 0
        while moved + PIECE_BYTES <= burst:
            await limit.take("ada", PIECE_BYTES, Lane.STREAM)
            moved += PIECE_BYTES
        assert clock.slept == []
        while moved < 20 * burst:
            await limit.take("ada", PIECE_BYTES, Lane.STREAM)
            moved += PIECE_BYTES
            assert moved <= rate * (clock.now - 1000) + burst + 1, "never more than that"
        assert clock.now - 1000 == pytest.approx((moved - burst) / rate, rel=0.01)
        clock.now += 3600.0  # a silence gives one burst again, not an hour's worth
        begun, moved = clock.now, 0
        while clock.now == begun:
            await limit.take("ada", PIECE_BYTES, Lane.STREAM)
            moved += PIECE_BYTES
        assert burst < moved <= burst + 2 * PIECE_BYTES

    run(work())


async def _bulk(limit: Limiter, peer: str, lane: Lane, took: list[str]) -> None:
    while True:
        await limit.take(peer, PIECE_BYTES, lane)
        took.append(peer)
        await asyncio.sleep(0)


async def _served(limit: Limiter, asking: list[tuple[str, Lane]], pieces_in_all: int) -> list[str]:
    """Whom the limiter serves, in order, when all of these want bulk for ever."""
    took: list[str] = []
    tasks = [asyncio.create_task(_bulk(limit, peer, lane, took)) for peer, lane in asking]
    await until(lambda: len(took) >= pieces_in_all)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took[:pieces_in_all]


def test_peers_take_turns_however_many_streams_each_has() -> None:
    async def work() -> None:
        asking = [("ada", Lane.STREAM)] * 9 + [("ben", Lane.STREAM)] + [("cem", Lane.STREAM)] * 2
        took = (await _served(limiter(Clock()), asking, 320))[20:]  # after the burst
        for peer in ("ada", "ben", "cem"):
            assert took.count(peer) == pytest.approx(100, abs=3)

    run(work())


def test_larger_answers_go_before_streams_and_do_not_starve_them() -> None:
    async def work() -> None:
        took = (await _served(limiter(Clock()), [("ada", Lane.STREAM), ("ben", Lane.CALL)], 220))[20:]
        assert took.count("ben") == pytest.approx(150, abs=3)

    run(work())


def test_small_messages_pass_while_bulk_waits_and_are_counted() -> None:
    async def work() -> None:
        clock = Gate()
        limit = limiter(clock)
        took: list[str] = []
        bulk = [asyncio.create_task(_bulk(limit, peer, Lane.STREAM, took)) for peer in ("ada", "ben")]
        await until(lambda: len(took) == BURST_BYTES_MIN // PIECE_BYTES)
        for _ in range(8):
            await limit.take("cem", 10_000, Lane.SMALL)
        assert clock.slept == []
        before = len(took)
        clock.opened.set()
        await until(lambda: len(took) >= before + 10)
        # The debt of the small ones is paid by those that wait.
        passed = clock.now - 1000
        assert 80_000 + len(took) * PIECE_BYTES <= RATE * passed + BURST_BYTES_MIN + 1
        for task in bulk:
            task.cancel()
        await asyncio.gather(*bulk, return_exceptions=True)

    run(work())


def test_a_flood_of_small_messages_keeps_to_the_limit_and_leaves_some_to_others() -> None:
    async def work() -> None:
        clock = Clock()
        limit = limiter(clock)
        small, took = 0, list[str]()
        bulk = asyncio.create_task(_bulk(limit, "ada", Lane.STREAM, took))

        async def flood() -> None:
            nonlocal small
            while True:
                await limit.take("eve", 10_000, Lane.SMALL)
                small += 10_000
                clock.now += 1e-4  # 100 MB a second, if they could
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        await until(lambda: clock.now > 1030)
        passed, moved = clock.now - 1000, len(took) * PIECE_BYTES
        for task in (bulk, flooding):
            task.cancel()
        await asyncio.gather(bulk, flooding, return_exceptions=True)
        assert small + moved <= RATE * passed + 2 * BURST_BYTES_MIN
        assert moved > 0.1 * RATE * passed
        assert small + moved > 0.9 * RATE * passed

    run(work())


def test_who_gives_up_is_not_waited_for() -> None:
    async def work() -> None:
        clock = Gate()
        limit = limiter(clock)
        took: list[str] = []
        gone = [asyncio.create_task(_bulk(limit, "ada", lane, took)) for lane in (Lane.CALL, Lane.STREAM, Lane.STREAM)]
        stays = asyncio.create_task(_bulk(limit, "ben", Lane.STREAM, took))
        await until(lambda: len(took) == BURST_BYTES_MIN // PIECE_BYTES)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        before = len(took)
        clock.opened.set()
        await until(lambda: len(took) >= before + 20)
        assert set(took[before:]) == {"ben"}
        assert (len(took) - 1) * PIECE_BYTES <= RATE * (clock.now - 1000) + BURST_BYTES_MIN, (
            "what they asked for is free"
        )
        stays.cancel()
        await asyncio.gather(stays, return_exceptions=True)

    run(work())


def test_a_window_without_a_limit_frees_those_who_wait() -> None:
    async def work() -> None:
        clock, minute = Gate(), 8 * 60
        limit = limiter(clock, parse_schedule("8mbit,09:00-10:00=none"), lambda: minute)
        took: list[str] = []
        bulk = asyncio.create_task(_bulk(limit, "ada", Lane.STREAM, took))
        await until(lambda: len(took) == BURST_BYTES_MIN // PIECE_BYTES)
        minute = 9 * 60
        clock.opened.set()
        await until(lambda: len(took) > 4)
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)
        slept = len(clock.slept)
        for _ in range(1000):
            await limit.take("ben", PIECE_BYTES, Lane.STREAM)
        assert len(clock.slept) == slept
        minute = 10 * 60  # the limit is back, with one burst
        begun, moved = clock.now, 0
        while clock.now == begun:
            await limit.take("ben", PIECE_BYTES, Lane.STREAM)
            moved += PIECE_BYTES
        assert moved <= BURST_BYTES_MIN + 2 * PIECE_BYTES

    run(work())


def test_places_are_as_many_as_the_limit_can_serve_in_time() -> None:
    limit = limiter(Clock(), Schedule(rate=UP_MIN))
    opened = []

    def enter(peer: str, *, is_favoured: bool) -> None:
        place = limit.place(peer, is_favoured=is_favoured)
        place.__enter__()
        opened.append(place)

    for number in range(3):
        enter(f"stranger {number}", is_favoured=False)
    with pytest.raises(NetworkError, match="busy with others within the limit of its line"):
        enter("a fourth stranger", is_favoured=False)
    for _ in range(3):
        enter("owner", is_favoured=True)
    with pytest.raises(NetworkError):
        enter("another owner", is_favoured=True)
    for place in opened:
        place.__exit__(None, None, None)
    opened.clear()
    for _ in range(3):
        enter("owner", is_favoured=True)
    with pytest.raises(NetworkError):
        enter("owner", is_favoured=True)
    enter("another owner", is_favoured=True)
    free = limiter(Clock(), UNLIMITED)
    for _ in range(1000):
        free.place("stranger", is_favoured=False).__enter__()


def test_what_is_small_is_so_by_stream_and_frame() -> None:
    call, stream = Flow(), Flow(is_stream=True)
    assert call.lane(SMALL_BYTES - 1) is Lane.SMALL
    assert call.lane(1) is Lane.CALL
    assert stream.lane(SMALL_BYTES) is Lane.STREAM
    assert stream.lane(100) is Lane.STREAM, "many small ones on one stream are not small"
    assert list(pieces(2 * PIECE_BYTES + 7)) == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, 2 * PIECE_BYTES + 7),
    ]
    assert list(pieces(0)) == []


def test_only_what_is_limited_has_a_limiter() -> None:
    limits = Limits.of(UNLIMITED, parse_schedule("none,01:00-02:00=1mbit"))
    assert limits.up is None
    assert limits.down is not None
    assert not limits.counts_local
