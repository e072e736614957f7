"""What a relay's rate is, when it is asked for and said, and how the quotas are typed and told."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from spes_bootstrap.main import build_parser
from spes_client.view import relayed_texts
from spes_p2p.net.limits import UP_MIN, Limiter, Schedule
from spes_p2p.net.reasons import BACKOFF, PEERS_MAX, Reasons
from spes_p2p.net.relayed import (
    AGAIN_SECONDS,
    RATE,
    RELAYS_MAX,
    SAID_PEERS_MAX,
    SAY_AGAIN_SECONDS,
    SILENT_SECONDS,
    RelayQuotas,
    RelayRates,
    relays_of,
)
from spes_p2p.net.relays import place_at
from spes_protocols.codec import encode
from spes_protocols.control_pb2 import LinkStatus, StatusReply
from spes_protocols.errors import NetworkError, UserError
from spes_protocols.requests import RelayReply

HERE = "/ip4/192.0.2.1/tcp/4001"


class Relay:
    """A relay that says `rate`, or nothing; and the rates of who asks it, by a clock that the test moves."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate
        self.asked = 0
        self.now = 1000.0
        self.made: list[float] = []
        self.rates = RelayRates(self.answer, limiter=self.limiter, clock=lambda: self.now)

    async def answer(self, relay: str) -> bytes:
        self.asked += 1
        if self.rate is None:
            raise NetworkError("no answer")
        return encode(RelayReply(rate=self.rate))

    def limiter(self, rate: float) -> Limiter:
        self.made.append(rate)
        return Limiter(Schedule(rate=rate))

    async def limiters(self, *peers: str) -> list[Limiter]:
        found = await asyncio.gather(*(self.rates.limiters(peer, ["R"]) for peer in peers or ("P",)))
        return found[-1]


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


@on_a_loop
async def test_a_relay_is_asked_once_in_a_while_and_all_streams_share_its_limiter() -> None:
    relay = Relay(2_000_000)
    assert not relay.rates.is_known("R")
    (first,) = await relay.limiters("P", "Q", "S")
    assert relay.asked == 1 and relay.made == [2_000_000] and relay.rates.rate("R") == 2_000_000
    relay.now += AGAIN_SECONDS
    assert await relay.limiters() == [first]  # asked again, and it says the same
    assert relay.asked == 2
    relay.rate = 0
    assert await relay.limiters() == [first]  # not asked yet
    relay.now += AGAIN_SECONDS
    assert await relay.limiters() == [] and relay.rates.rate("R") is None
    relay.rate = 1
    relay.now += AGAIN_SECONDS
    assert await relay.limiters() and relay.rates.rate("R") == UP_MIN  # nobody can have us stand still


@on_a_loop
async def test_a_relay_that_does_not_answer_has_the_usual_rate_and_then_its_last_one() -> None:
    relay = Relay(None)
    assert await relay.limiters() and relay.made == [RATE] and relay.rates.is_known("R")
    relay.now += SILENT_SECONDS - 1
    await relay.limiters()
    assert relay.asked == 1
    relay.now += 1
    relay.rate = 3_000_000
    await relay.limiters()
    relay.now += AGAIN_SECONDS
    relay.rate = None
    await relay.limiters()
    assert relay.made == [RATE, 3_000_000] and relay.rates.rate("R") == 3_000_000


@on_a_loop
async def test_relays_are_kept_count_of() -> None:
    relay = Relay(2_000_000)
    for number in range(RELAYS_MAX + 1):
        await relay.rates.look(f"R{number}")
    assert not relay.rates.is_known("R0") and relay.rates.is_known("R1")


def test_the_log_says_once_in_a_while_whom_bulk_goes_to(caplog: pytest.LogCaptureFixture) -> None:
    relay = Relay(1_250_000)

    async def send() -> None:
        for number in range(50):
            await relay.limiters(f"P{number}")
        relay.now += SAY_AGAIN_SECONDS
        await relay.limiters("P50")

    with caplog.at_level(logging.INFO, "spes_p2p.net.relayed"):
        asyncio.run(send())
    first, second = caplog.messages
    assert first == "bulk goes through the relay R, at most 10 Mbit/s: to P0"
    assert second.startswith("bulk goes through the relay R, at most 10 Mbit/s: to P1, P2, ")
    assert second.count(", P") == SAID_PEERS_MAX - 1


def test_which_relays_a_peer_is_reached_through() -> None:
    through = f"{HERE}/p2p/R/p2p-circuit"
    assert relays_of([through, through, f"{HERE}/p2p/S/p2p-circuit"]) == ("R", "S")
    assert relays_of([through, HERE]) == relays_of([]) == relays_of([HERE]) == ()
    assert relays_of([f"{HERE}/p2p-circuit"]) == ()  # it does not say which
    public = "/ip4/11.0.113.1/tcp/4001/p2p/R"
    assert place_at(public, [f"{public}/p2p-circuit/p2p/ME"]) == "held"
    assert place_at(public, [f"{HERE}/p2p/ME"]) == "none"
    assert place_at("/ip4/192.168.1.9/tcp/4001/p2p/R", []) == "unknown"


def test_quotas_as_they_are_typed_told_and_given_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    args = build_parser().parse_args([])
    assert (args.relay_rate, args.relay_circuits, args.relay_data * 2**30) == (RATE, 64, RelayQuotas().bytes_max)
    typed = build_parser().parse_args(["--relay-rate", "none", "--relay-circuits", "3", "--relay-data", "2"])
    assert (typed.relay_rate, typed.relay_circuits, typed.relay_data) == (None, 3, 2)
    monkeypatch.setenv("SPES_RELAY_RATE", "20mbit")
    assert build_parser().parse_args([]).relay_rate == 2_500_000
    for text, told in (("1mbit", "at least 1.2mbit"), ("5mbit,1:00-2:00=none", "all day"), ("fast", "not a rate")):
        with pytest.raises(UserError, match=f"^--relay-rate: .*{told}"):
            build_parser().parse_args(["--relay-rate", text])
    with pytest.raises(UserError):
        RelayQuotas(rate=1.0)
    with pytest.raises(UserError):
        RelayQuotas(circuits=0)
    quotas = RelayQuotas(circuits=3, bytes_max=2**31)
    assert quotas.words() == "10 Mbit/s in bulk, 3 relayed connections, each cut after 2 GiB one way or 30 min"
    assert quotas.flags()[:2] == ["-relayMaxCircuits=3", "-relayDataLimit=2147483648"]


def test_the_reason_before_is_told_while_it_is_too_soon_to_try_again() -> None:
    reasons = Reasons()
    assert reasons.note("P", "all dials failed: dial backoff") == BACKOFF
    refused = reasons.note("P", "error opening relay circuit: RESOURCE_LIMIT_EXCEEDED (201)")
    assert "no more room" in refused and reasons.note("P", "dial backoff") == refused
    for number in range(PEERS_MAX):
        reasons.note(f"P{number}", "connection refused")
    assert reasons.note("P", "dial backoff") == BACKOFF


def test_a_host_name_that_is_not_found_is_told_as_such_and_an_unknown_address_not_as_a_host_name() -> None:
    assert "check the host name" in Reasons().note("P", "failed to dial: failed to dial P: no good addresses")
    assert Reasons().note("P", "failed to find any peer in table; routing: not found") == (
        "no address of it is known here"
    )


def test_the_status_names_relayed_peers_by_relay_and_not_all_of_many() -> None:
    many = [
        LinkStatus(peer=f"12D3{n:06}", path="relayed", relays=["12D3relay1"], relay_bytes_per_second=RATE)
        for n in range(8)
    ]
    other = LinkStatus(peer="12D3oth\x1ber1", path="relayed", relays=["12D3relay2"])
    direct = LinkStatus(peer="direct", path="direct")
    assert relayed_texts(StatusReply(links=[*many, other, direct])) == [
        "…000000, …000001, …000002, …000003, …000004, …000005 and 2 more through …relay1, at most 10 Mbit/s",
        "…th er1 through …relay2, no limit",
    ]
