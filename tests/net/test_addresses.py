"""Pasted addresses: what is accepted, and what a person is told about the rest."""

import pytest

from spes_p2p.net.addresses import check_announce, check_listen, is_circuit, parse_address, relay_of, tcp_address
from spes_protocols.errors import UserError

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
OTHER = "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
        f"/dns4/boot.example.org/tcp/65535/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{OTHER}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_an_address_with_and_without_a_run_id(address: str) -> None:
    assert is_circuit(address) is (OTHER in address) and relay_of(address) == (OTHER if OTHER in address else "")
    assert parse_address(f" {address}\n") == (address, PEER, None)
    assert parse_address(f"{address}#{'0a' * 32}") == (address, PEER, b"\x0a" * 32)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a peer's address"),
        ("boot.example.org:4001", "not a peer's address"),
        ("/ip4/1.2.3.4/tcp/4001", "not a peer's address"),
        (f"ip4/1.2.3.4/tcp/4001/p2p/{PEER}", "not a peer's address"),
        (f"/ip4/1.2.3/tcp/4001/p2p/{PEER}", "not an IPv4 address"),
        (f"/ip6/1.2.3.4/tcp/4001/p2p/{PEER}", "not an IPv6 address"),
        (f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}", "not an IPv6 address"),
        (f"/ip6/fe80::1%\x1b[2J/tcp/4001/p2p/{PEER}", "not an IPv6 address"),
        (f"/dns4/-x/tcp/4001/p2p/{PEER}", "not a host name"),
        (f"/onion/x/tcp/4001/p2p/{PEER}", "/onion is not supported"),
        (f"/ip4/1.2.3.4/udp/4001/p2p/{PEER}", "/udp is not supported"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "not a port"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}", "not a port"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER[:-1]}", "not a peer id"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER[:-1]}0", "not a peer id"),
        (f"/ip4/1.2.3.4/tcp/4001/ws/p2p/{PEER}", "not understood"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER}#", "run id"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{PEER}#{'0' * 63}g", "run id"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_address(text)


def test_the_address_of_a_port() -> None:
    assert [tcp_address(ip, 5) for ip in ("1.2.3.4", "2001:db8::1")] == ["/ip4/1.2.3.4/tcp/5", "/ip6/2001:db8::1/tcp/5"]


def test_a_relay_that_is_not_named_is_one_still() -> None:
    assert is_circuit("/ip4/1.2.3.4/tcp/1/p2p-circuit") and not relay_of("/ip4/1.2.3.4/tcp/1/p2p-circuit")
    assert not is_circuit("/dns4/p2p-circuit.example.org/tcp/1")


def test_listen_and_announce_addresses() -> None:
    assert check_listen("/ip4/0.0.0.0/tcp/0") == ("0.0.0.0", 0)
    assert check_listen("/ip6/::/tcp/4001") == ("::", 4001)
    assert check_announce("/dns4/boot.example.org/tcp/4001") == "/dns4/boot.example.org/tcp/4001"
    for text in ("4001", "/dns4/x/tcp/1", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "/ip4/0.0.0.0/tcp/x"):
        with pytest.raises(UserError):
            check_listen(text)
    for text in ("/ip4/0.0.0.0/tcp/0", "x", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}"):
        with pytest.raises(UserError):
            check_announce(text)
