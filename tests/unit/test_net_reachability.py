"""What peers saw of this machine, and what is made of it."""

from __future__ import annotations

import pytest

from spes_p2p.net.reachability import Answer, Kind, Verdict, end_of, judge

OWN = ("192.168.1.7", "127.0.0.1", "11.0.0.1")
PORTS = (4001,)


def seen(ip: str = "11.0.0.9", port: int = 4001, *open_ports: int) -> Answer:
    return Answer(ip=ip, port=port, open=frozenset(open_ports))


def verdict(*answers: Answer) -> Verdict:
    return judge(OWN, PORTS, answers)


def test_a_public_address_is_one_of_this_machine_where_others_get_in() -> None:
    got_in, not_in = seen("11.0.0.1", 4001, 4001), seen("11.0.0.1")
    assert verdict(got_in) == verdict(got_in, got_in, not_in) == Verdict(kind=Kind.PUBLIC)
    assert verdict(not_in).kind is verdict(got_in, not_in).kind is Kind.CLOSED
    assert verdict(seen("11.0.0.1", 4001, 22)).kind is Kind.CLOSED


def test_a_forwarded_port_is_told_to_others() -> None:
    assert verdict(seen("11.0.0.9", 4001, 4001), seen("11.0.0.9", 4001, 4001)) == Verdict(
        kind=Kind.FORWARDED, address="/ip4/11.0.0.9/tcp/4001"
    )
    assert verdict(seen("11.0.0.9", 5005, 5005)).address == "/ip4/11.0.0.9/tcp/5005"
    assert judge(OWN, PORTS, [seen("2a00::9", 4001, 4001)]).address == "/ip6/2a00::9/tcp/4001"


def test_a_port_that_the_router_was_asked_for_is_told_apart_from_one_that_it_forwards() -> None:
    at_mapped, at_both = seen("11.0.0.9", 7000, 5005), seen("11.0.0.9", 7000, 4001, 5005)
    at = Verdict(kind=Kind.MAPPED, address="/ip4/11.0.0.9/tcp/5005")
    assert judge(OWN, PORTS, [at_mapped, at_mapped, seen(port=7001)], mapped=[5005]) == at
    assert judge(OWN, PORTS, [at_both], mapped=[5005]).kind is Kind.FORWARDED
    assert judge(OWN, PORTS, [seen(port=7000), seen(port=7001)], mapped=[5005]).kind is Kind.SYMMETRIC


def test_behind_a_router_the_ports_that_are_seen_tell_its_kind() -> None:
    assert verdict(seen(), seen(), seen()).kind is verdict(seen()).kind is Kind.PRESERVING
    assert verdict(seen(port=7000), seen(port=7000)).kind is Kind.PRESERVING
    assert verdict(seen(port=7000), seen(port=7001)).kind is verdict(seen(port=7000)).kind is Kind.SYMMETRIC


def test_what_less_than_half_say_does_not_count() -> None:
    liar = seen("12.0.0.1", 4001, 4001)
    assert verdict(seen(), seen(), liar).kind is Kind.PRESERVING
    assert verdict(seen(), liar).kind is Kind.UNKNOWN
    assert verdict(seen(), seen("11.0.0.9", 4001, 4001)).kind is Kind.PRESERVING


def test_peers_of_the_same_private_network_say_nothing_of_the_internet() -> None:
    near = seen("192.168.1.7", 4001, 4001)
    assert verdict(near, near, seen()).kind is Kind.PRESERVING
    assert verdict(near).kind is Kind.PUBLIC
    assert verdict(seen("192.168.1.7")).kind is verdict().kind is Kind.UNKNOWN


@pytest.mark.parametrize("kind", Kind)
def test_who_cannot_be_reached_needs_a_relay(kind: Kind) -> None:
    assert Verdict(kind=kind).needs_relay == (kind not in (Kind.PUBLIC, Kind.FORWARDED, Kind.MAPPED, Kind.UNKNOWN))


def test_ends_of_connections() -> None:
    assert end_of("/ip4/11.0.0.9/tcp/4001") == ("11.0.0.9", 4001)
    assert end_of("/ip6/2a00:0::9/tcp/4001") == ("2a00::9", 4001)
    assert end_of("/ip6zone/eth0/ip6/fe80::1/tcp/7") == ("fe80::1", 7)
    for other in (
        "",
        "/ip4/11.0.0.9/udp/4001",
        "/ip4/1.2.3.4/tcp/1/p2p/X/p2p-circuit",
        "/ip4/x/tcp/1",
        "/ip4/1.1.1.1/tcp/0",
    ):
        assert end_of(other) is None
