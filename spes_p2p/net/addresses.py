"""Addresses as people paste them: `/ip4/1.2.3.4/tcp/4001/p2p/12D3KooW...#<run id>`, checked before anything dials.

Where in the data's way: from the command line or a presence record to the daemon, which only sees what passed here.
"""

from __future__ import annotations

import ipaddress
import re

from spes_p2p.crypto.keys import public_key_of
from spes_protocols.errors import RemoteError, UserError

_EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
_CIRCUIT = "p2p-circuit"
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")


def parse_address(text: str) -> tuple[str, str, bytes | None]:
    """(multiaddr ending in `/p2p/<peer id>`, peer id, run id or None) of a pasted address.

    Raises `UserError` that says which part is wrong.
    """
    address, mark, run = text.strip().partition("#")
    run_id = None
    if mark:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", run):
            raise UserError(f"{text!r}: what follows '#' must be a run id of 64 hexadecimal digits")
        run_id = bytes.fromhex(run)
    parts = address.split("/")
    if len(parts) < 7 or parts[0] or parts[-2] != "p2p":
        raise UserError(f"{text!r} is not a peer's address; it looks like {_EXAMPLE}")
    _check_host_and_port(text, parts[1:5])
    _check_relay(text, parts[5:-2])
    peer_id = parts[-1]
    try:
        public_key_of(peer_id)
    except RemoteError:
        raise UserError(f"{text!r}: {peer_id!r} is not a peer id; was it cut off when it was copied?") from None
    return address, peer_id, run_id


def tcp_address(ip: str, port: int) -> str:
    """The multiaddr of a TCP port at an IP address."""
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"


def is_circuit(multiaddr: str) -> bool:
    """Whether an address leads to its peer through a relay."""
    return _CIRCUIT in multiaddr.split("/")


def relay_of(multiaddr: str) -> str:
    """Peer id of the relay that an address leads through; empty for none, or one that is not named."""
    before, mark, _ = multiaddr.partition(f"/{_CIRCUIT}")
    relay = before.rpartition("/p2p/")[2]
    return relay if mark and "/" not in relay else ""


def check_listen(text: str) -> tuple[str, int]:
    """(IP address, TCP port) of a multiaddr to listen on; port 0 means any. Raises `UserError`."""
    parts = text.strip().split("/")
    if len(parts) != 5 or parts[0] or parts[1] not in ("ip4", "ip6"):
        raise UserError(f"--listen {text!r} is not an address to listen on; it looks like /ip4/0.0.0.0/tcp/4001")
    _check_host_and_port(text, parts[1:5], port_min=0)
    return parts[2], int(parts[4])


def check_announce(text: str) -> str:
    """A multiaddr to tell other peers, without a peer id. Raises `UserError`."""
    parts = text.strip().split("/")
    if len(parts) != 5 or parts[0]:
        raise UserError(f"--announce {text!r} is not an address; it looks like /ip4/203.0.113.7/tcp/4001")
    _check_host_and_port(text, parts[1:5])
    return text.strip()


def _check_host_and_port(text: str, parts: list[str], port_min: int = 1) -> None:
    kind, host, transport, port = parts
    if kind in ("ip4", "ip6"):
        try:
            # A zone ("%eth0") may be any text to Python, none to the daemon, and means nothing to another machine.
            version = ipaddress.ip_address(host).version if "%" not in host else None
        except ValueError:
            version = None
        if version != int(kind[2]):
            raise UserError(f"{text!r}: {host!r} is not an IPv{kind[2]} address")
    elif kind in ("dns", "dns4", "dns6"):
        if not _HOST_NAME.fullmatch(host):
            raise UserError(f"{text!r}: {host!r} is not a host name")
    else:
        raise UserError(f"{text!r}: /{kind} is not supported, use /ip4, /ip6 or /dns")
    if transport != "tcp":
        raise UserError(f"{text!r}: /{transport} is not supported, only /tcp is")
    if not port.isascii() or not port.isdigit() or not port_min <= int(port) <= 65535:
        raise UserError(f"{text!r}: {port!r} is not a port from {port_min} to 65535")


def _check_relay(text: str, parts: list[str]) -> None:
    relayed = len(parts) == 3 and parts[0] == "p2p" and _PEER_ID.fullmatch(parts[1]) and parts[2] == _CIRCUIT
    if parts and not relayed:
        raise UserError(f"{text!r}: '/{'/'.join(parts)}' is not understood; an address looks like {_EXAMPLE}")
